"""Packing: what lies where, that nothing can tell it is packed, and that nothing is lost."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learning.cartridge.composition import stack_prefixes
from learning.packing import PackedRows, pack, response_logits
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
    kv, lengths = stack_prefixes([twin.kv[name] for name in packed.names])
    logits = response_logits(twin.model, packed, kv, lengths)
    parts = logits.split([len(s.response_ids) for s in samples])
    return {s.id: part for s, part in zip(samples, parts, strict=True)}


def test_rows_worked_by_hand() -> None:
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
    # "late" takes x (5 tokens), then w (4) opens a row, then z (2) fits beside x; "early" has one
    # row, and a second of padding because every document has equally many.
    assert packed.names == ("early", "late")
    assert packed.ids.tolist() == [
        [1, 2, 3, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
        [5, 6, 7, 8, 9, 4, 11],
        [12, 13, 14, 15, 0, 0, 0],
    ]
    assert packed.positions.tolist() == [
        [10, 11, 12, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
        [20, 21, 22, 23, 24, 20, 21],
        [20, 21, 22, 23, 0, 0, 0],
    ]
    assert packed.segments.tolist() == [
        [0, 0, 0, -1, -1, -1, -1],
        [-1, -1, -1, -1, -1, -1, -1],
        [0, 0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, -1, -1, -1],
    ]
    # In sample order x, y, z, w: the token before each response token predicts it.
    assert packed.row.tolist() == [2, 2, 2, 0, 0, 2, 3, 3]
    assert packed.column.tolist() == [1, 2, 3, 0, 1, 5, 1, 2]
    assert packed.targets.tolist() == [7, 8, 9, 2, 3, 11, 14, 15]


def test_rows_are_no_wider_than_needed() -> None:
    packed = pack([sample("x", "d", (5, 6), (7,))], {"d": 4}, row_tokens=512)
    assert packed.ids.tolist() == [[5, 6, 7]]


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
            torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


def test_gradient_reaches_only_the_prefix_that_was_read(
    llama: Twin, make_samples: MakeSamples
) -> None:
    samples = make_samples(("a", 3, 2), ("b", 3, 2))
    packed = pack(samples, {"a": 24, "b": 17}, row_tokens=8)
    kv, lengths = stack_prefixes([llama.kv["a"], llama.kv["b"]])
    kv.requires_grad_()
    response_logits(llama.model, packed, kv, lengths)[:2].square().sum().backward()
    assert kv.grad is not None
    assert kv.grad[0].abs().amax() > 0
    assert torch.equal(kv.grad[1], torch.zeros_like(kv.grad[1]))


def test_prefixes_are_padded_to_the_longest() -> None:
    short, long = torch.ones(1, 2, 1, 2, 3), torch.full((1, 2, 1, 4, 3), 2.0)
    kv, lengths = stack_prefixes([short, long])
    assert lengths is not None
    assert lengths.tolist() == [2, 4]
    assert kv[:, 0, 0, 0, :, 0].tolist() == [[1, 1, 0, 0], [2, 2, 2, 2]]
    equal, none = stack_prefixes([long, long])
    assert none is None
    assert equal.shape == (2, 1, 2, 1, 4, 3)


def test_a_sample_longer_than_a_row_is_refused() -> None:
    with pytest.raises(
        DataError,
        match=r"sample s7 has 5 tokens and a row holds 4; raise train.row_tokens or lower "
        r"rollout.max_tokens",
    ):
        pack([sample("s7", "d", (1, 2), (3, 4, 5))], {"d": 1}, row_tokens=4)


@pytest.mark.parametrize(("prompt", "response"), [((), (1,)), ((1,), ())])
def test_an_empty_prompt_or_response_is_refused(
    prompt: tuple[int, ...], response: tuple[int, ...]
) -> None:
    with pytest.raises(DataError, match="sample s7 has an empty prompt or response"):
        pack([sample("s7", "d", prompt, response)], {"d": 1}, row_tokens=4)


def read_back(packed: PackedRows, prefix_tokens: dict[str, int]) -> Counter[tuple[str, str]]:
    """(document, tokens) of every segment, read from the rows; positions are checked on the way."""
    per = len(packed.ids) // len(packed.names)
    found: Counter[tuple[str, str]] = Counter()
    for row in range(len(packed.ids)):
        name = packed.names[row // per]
        for segment in range(int(packed.segments[row].max()) + 1):
            (columns,) = torch.nonzero(packed.segments[row] == segment, as_tuple=True)
            start = prefix_tokens[name]
            assert columns.tolist() == list(range(int(columns[0]), int(columns[-1]) + 1))
            assert packed.positions[row, columns].tolist() == [
                start + t for t in range(len(columns))
            ]
            found[name, str(packed.ids[row, columns].tolist())] += 1
    return found


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 6), st.integers(1, 6)),
        min_size=1,
        max_size=12,
    ),
    slack=st.integers(0, 20),
    seed=st.integers(0, 99),
)
def test_every_sample_is_packed_once_and_no_row_overflows(
    make_samples: MakeSamples, shapes: list[tuple[str, int, int]], slack: int, seed: int
) -> None:
    samples = make_samples(*shapes, seed=seed)
    prefix_tokens = {"a": 3, "b": 0, "c": 50}
    row_tokens = max(prompt + response for _, prompt, response in shapes) + slack
    packed = pack(samples, prefix_tokens, row_tokens)
    assert packed.ids.shape[1] <= row_tokens
    assert read_back(packed, prefix_tokens) == Counter(
        (s.cartridge, str([*s.prompt_ids, *s.response_ids])) for s in samples
    )
    # What stands one after the predicting token is the response token, in sample order.
    assert packed.ids[packed.row, packed.column + 1].tolist() == packed.targets.tolist()
    assert packed.targets.tolist() == [t for s in samples for t in s.response_ids]


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
    assert packed.ids.tolist() == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 0, 0]]
    assert packed.targets.tolist() == [3, 4, 5, 7, 4, 5, 3, 4, 5]
    assert packed.row.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert packed.column.tolist() == [1, 2, 3, 5, 2, 3, 1, 2, 3]
