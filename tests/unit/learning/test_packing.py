"""Packing: what lies where, that nothing can tell it is packed, and that nothing is lost."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from twins import NEAR

from learning.batch import PackedTokens, even_parts, pack, response_logits
from protocols.errors import DataError
from protocols.types import Sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from twins import Twin

    MakeSamples = Callable[..., list[Sample]]


def sample(name: str, document: str, prompt: tuple[int, ...], response: tuple[int, ...]) -> Sample:
    return Sample(name, document, prompt, response, (0.0,) * len(response), (0,) * len(response))


def logits_of(twin: Twin, samples: list[Sample], row_tokens: int) -> dict[str, Tensor]:
    """Response logits [n, V] by sample id, all samples in one packed forward."""
    packed = pack(samples, {name: kv.shape[3] for name, kv in twin.kv.items()}, row_tokens)
    logits = response_logits(twin.model, packed, [twin.kv[name] for name in packed.names])
    parts = logits.split([len(s.response_ids) for s in samples])
    return {s.id: part for s, part in zip(samples, parts, strict=True)}


def test_tokens_worked_by_hand() -> None:
    packed = pack(
        [
            sample("x", "late", (5, 6), (7, 8, 9)),
            sample("y", "early", (1,), (2, 3)),
            sample("z", "late", (4,), (11,)),
            sample("w", "late", (12, 13), (14, 15)),
        ],
        {"early": 10, "late": 20},
        row_tokens=7,
    )
    # By prefix, then longest first: y, then x, w, z, each without its last token.
    assert packed.names == ("early", "late")
    assert packed.counts == (1, 3)
    assert packed.lengths == (2, 4, 3, 1)
    assert packed.ids.tolist() == [1, 2, 5, 6, 7, 8, 12, 13, 14, 4]
    assert packed.positions.tolist() == [10, 11, 20, 21, 22, 23, 20, 21, 22, 20]
    # In sample order x, y, z, w: the token before each response token predicts it.
    assert packed.predicts.tolist() == [3, 4, 5, 0, 1, 9, 7, 8]
    assert packed.targets.tolist() == [7, 8, 9, 2, 3, 11, 14, 15]


@pytest.mark.parametrize("row_tokens", [11, 16, 40])
def test_packed_equals_alone_equals_transformers(
    twin: Twin, make_samples: MakeSamples, row_tokens: int
) -> None:
    samples = make_samples(
        ("b", 4, 3), ("a", 2, 1), ("a", 7, 4), ("c", 1, 6), ("b", 1, 1), ("b", 5, 5), ("a", 3, 2)
    )
    together = logits_of(twin, samples, row_tokens)
    reversed_order = logits_of(twin, samples[::-1], row_tokens)
    for s in samples:
        expected = twin.response_logits(s, twin.kv[s.cartridge])
        alone = logits_of(twin, [s], row_tokens)[s.id]
        for logits in (together[s.id], reversed_order[s.id], alone):
            torch.testing.assert_close(logits, expected, rtol=0, atol=NEAR)


def test_gradient_reaches_only_the_prefix_that_was_read(
    llama: Twin, make_samples: MakeSamples
) -> None:
    samples = make_samples(("a", 3, 2), ("b", 3, 2))
    packed = pack(samples, {"a": 24, "b": 17}, row_tokens=8)
    a, b = (llama.kv[name].clone().requires_grad_() for name in "ab")
    response_logits(llama.model, packed, [a, b])[:2].square().sum().backward()
    assert a.grad is not None
    assert a.grad.abs().amax() > 0
    assert b.grad is not None
    assert torch.equal(b.grad, torch.zeros_like(b.grad))


def test_a_sample_longer_than_the_bound_is_refused() -> None:
    with pytest.raises(
        DataError,
        match=r"sample s7 has 5 tokens of prompt and response, and train.row_tokens allows 4; "
        r"raise train.row_tokens or lower rollout.max_tokens",
    ):
        pack([sample("s7", "d", (1, 2), (3, 4, 5))], {"d": 1}, row_tokens=4)


@pytest.mark.parametrize(("prompt", "response"), [((), (1,)), ((1,), ())])
def test_an_empty_prompt_or_response_is_refused(
    prompt: tuple[int, ...], response: tuple[int, ...]
) -> None:
    with pytest.raises(DataError, match="sample s7 has an empty prompt or response"):
        pack([sample("s7", "d", prompt, response)], {"d": 1}, row_tokens=4)


def read_back(packed: PackedTokens, prefix_tokens: dict[str, int]) -> Counter[tuple[str, str]]:
    """(document, tokens) of every sequence; positions are checked on the way."""
    found: Counter[tuple[str, str]] = Counter()
    lengths, at = iter(packed.lengths), 0
    for name, count in zip(packed.names, packed.counts, strict=True):
        for _ in range(count):
            of = slice(at, at := at + next(lengths))
            start = prefix_tokens[name]
            assert packed.positions[of].tolist() == [*range(start, start + of.stop - of.start)]
            found[name, str(packed.ids[of].tolist())] += 1
    assert at == len(packed.ids)
    return found


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 6), st.integers(1, 6)),
        min_size=1,
        max_size=12,
    ),
    seed=st.integers(0, 99),
)
def test_every_sample_is_packed_once_and_nothing_is_padded(
    make_samples: MakeSamples, shapes: list[tuple[str, int, int]], seed: int
) -> None:
    samples = make_samples(*shapes, seed=seed)
    prefix_tokens = {"a": 3, "b": 0, "c": 50}
    packed = pack(samples, prefix_tokens, row_tokens=12)
    laid = {(s.cartridge, s.prompt_ids + s.response_ids) for s in samples}
    assert read_back(packed, prefix_tokens) == Counter((n, str([*ids[:-1]])) for n, ids in laid)
    assert packed.targets.tolist() == [t for s in samples for t in s.response_ids]
    # The tokens that predict a sample's response are its last prompt token, then the response's.
    read = packed.ids[packed.predicts].tolist()
    assert read == [i for s in samples for i in (s.prompt_ids[-1], *s.response_ids[:-1])]


def test_even_parts_by_hand() -> None:
    lengths = [3, 3, 2, 4]
    assert even_parts(lengths, "baba", 1) == [[0, 1, 2, 3]]
    assert even_parts(lengths, "baba", 2) == [[1, 3], [0, 2]], "7 tokens over a, 5 over b"
    assert even_parts(lengths, "aaaa", 2) == [[0, 1], [2, 3]]
    assert even_parts([9, 1], "ab", 2) == [[0], [1]]
    assert even_parts([9], "a", 4) == [[0]], "no part is empty"
    assert even_parts([], "", 2) == []


@given(
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from("abc")), max_size=30), st.integers(1, 4)
)
def test_even_parts_have_every_text_once_and_about_equally_many_tokens(
    texts: list[tuple[int, str]], count: int
) -> None:
    lengths, prefixes = [n for n, _ in texts], [p for _, p in texts]
    parts = even_parts(lengths, prefixes, count)
    assert sorted(i for part in parts for i in part) == list(range(len(texts)))
    most = max(lengths, default=0)
    for part in parts:
        assert sum(lengths[i] for i in part) <= sum(lengths) / count + most
    held = Counter(prefix for part in parts for prefix in {prefixes[i] for i in part})
    assert sum(n - 1 for n in held.values()) <= count - 1


def test_the_same_tokens_share_a_place() -> None:
    """An episode, a turn of it after its whole context, and the same words about another desk."""
    packed = pack(
        [
            sample("x", "a", (1, 2), (3, 4, 5)),
            sample("y", "a", (6,), (7,)),
            sample("x again", "a", (1, 2, 3), (4, 5)),
            sample("x elsewhere", "b", (1, 2), (3, 4, 5)),
        ],
        {"a": 10, "b": 10},
        row_tokens=9,
    )
    assert packed.ids.tolist() == [1, 2, 3, 4, 6, 1, 2, 3, 4]
    assert (packed.counts, packed.lengths) == ((2, 1), (4, 1, 4))
    assert packed.targets.tolist() == [3, 4, 5, 7, 4, 5, 3, 4, 5]
    assert packed.predicts.tolist() == [1, 2, 3, 4, 2, 3, 6, 7, 8]
