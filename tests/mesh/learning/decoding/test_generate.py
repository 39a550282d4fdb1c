"""Decoding against transformers' generate, and sampling against the distribution itself."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cartridge_forge.learning import decode as decode_batch
from cartridge_forge.learning import draws
from cartridge_forge.learning.cartridge import CartridgeVersions
from cartridge_forge.learning.decode import DecodeBatch, generate
from cartridge_forge.learning.draws import draw
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef, Sampling

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from twins import Twin

NO_END: frozenset[int] = frozenset()

A, B, C = (PrefixRef(f"document/{name}", 0) for name in "abc")


def lookup(twin: Twin) -> Callable[[PrefixRef], Tensor]:
    return lambda ref: twin.kv[ref.name.rpartition("/")[2]]


def request(
    name: str,
    prefix: PrefixRef,
    prompt_tokens: int,
    max_tokens: int,
    seed: int = 0,
    **sampling: float,
) -> GenerateRequest:
    random = torch.Generator().manual_seed(sum(name.encode()) * 100 + prompt_tokens)
    prompt = tuple(torch.randint(3, 97, (prompt_tokens,), generator=random).tolist())
    return GenerateRequest(name, prompt, prefix, Sampling(max_tokens=max_tokens, **sampling), seed)


def by_transformers(twin: Twin, r: GenerateRequest, end_ids: frozenset[int]) -> tuple[int, ...]:
    """transformers' own greedy generate over the same past_key_values."""
    kv = lookup(twin)(r.prefix)
    # It drops as many ids from the front as the cache holds; which they were does not matter.
    ids = torch.tensor([[0] * kv.shape[3] + list(r.prompt_ids)])
    out = twin.plain.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=twin.cache(kv),
        max_new_tokens=r.sampling.max_tokens,
        do_sample=False,
        eos_token_id=sorted(end_ids) or None,
        pad_token_id=0,
    )
    return tuple(out[0, ids.shape[1] :].tolist())


# Prompts and budgets of different lengths, five rows over A, three over B, two over C.
RAGGED = [
    request(name, prefix, prompt, budget, temperature=0)
    for name, prefix, prompt, budget in [
        ("p", A, 3, 4),
        ("q", B, 9, 1),
        ("r", A, 1, 24),
        ("s", C, 5, 3),
        ("t", B, 2, 5),
        ("u", C, 7, 8),
        ("v", A, 4, 2),
        ("w", A, 6, 9),
        ("x", B, 5, 1),
        ("y", A, 2, 3),
    ]
]


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from twins import Twin


ALMOST_ONE = 1 - 2**-53  # the greatest float64 below 1, and the greatest that torch.rand gives


SAMPLED = [
    request("k", A, 4, 14, seed=11),
    request("l", B, 7, 9, seed=12, temperature=0.7),
    request("m", A, 2, 14, seed=13, top_k=5),
    request("n", C, 3, 5, seed=14, top_p=0.8),
    request("o", C, 6, 14, seed=11),
    request("g", B, 5, 8, temperature=0),
]


@pytest.fixture(scope="module")
def alone(llama: Twin) -> dict[str, Completion]:
    """Each request decoded in a batch of its own."""
    return {r.id: generate(llama.model, [r], lookup(llama), NO_END)[0] for r in SAMPLED}


def drawn(probs: Sequence[float], uniforms: Sequence[float], **sampling: float) -> list[int]:
    u = torch.tensor(uniforms, dtype=torch.float64)
    logits = torch.tensor(probs, dtype=torch.float64).log().expand(len(u), -1)
    return draw(logits, u, Sampling(**sampling)).tolist()


HALVES = (0.125, 0.5, 0.25, 0.125)


weights = st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(sum)


def test_greedy_equals_transformers_generate(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prefixes of different lengths, ragged prompts, and budgets so different that finished
    rows are dropped on the way."""
    kept: list[int] = []
    keep = DecodeBatch._keep

    def recorded(batch: DecodeBatch, rows: list[int]) -> None:
        kept.append(len(rows))
        keep(batch, rows)

    monkeypatch.setattr(DecodeBatch, "_keep", recorded)
    done = generate(twin.model, RAGGED, lookup(twin), NO_END)
    assert [c.request_id for c in done] == list("pqrstuvwxy")
    assert [c.token_ids for c in done] == [by_transformers(twin, r, NO_END) for r in RAGGED]
    assert [c.finish_reason for c in done] == ["length"] * 10
    # Of 10 rows 7 live after 2 tokens, 5 after 3, 4 of 5 after 4, 3 after 5, 2 after 8, 1 after 9.
    assert kept == [7, 5, 3, 2, 1]


def test_greedy_stops_where_transformers_stops(twin: Twin) -> None:
    free = generate(twin.model, RAGGED, lookup(twin), NO_END)
    # End tokens that do come up: the second token of "r" and the fifth of "t".
    end_ids = frozenset({free[2].token_ids[1], free[4].token_ids[4]})
    done = generate(twin.model, RAGGED, lookup(twin), end_ids)
    assert [c.token_ids for c in done] == [by_transformers(twin, r, end_ids) for r in RAGGED]
    for c, whole in zip(done, free, strict=True):
        assert c.token_ids == whole.token_ids[: len(c.token_ids)]
        ended = [t in end_ids for t in c.token_ids]
        assert not any(ended[:-1])
        assert c.finish_reason == ("stop" if ended[-1] else "length")
    assert done[2].finish_reason == done[4].finish_reason == "stop"
    assert len(done[2].token_ids) == 2


def test_the_end_token_as_last_of_the_budget_is_a_stop(llama: Twin) -> None:
    r = request("p", A, 3, 4, temperature=0)
    (free,) = generate(llama.model, [r], lookup(llama), NO_END)
    assert len(set(free.token_ids)) == 4
    (done,) = generate(llama.model, [r], lookup(llama), frozenset(free.token_ids[3:]))
    assert (done.token_ids, done.finish_reason) == (free.token_ids, "stop")


def test_very_uneven_groups_are_decoded_together_without_further_rows(
    twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request(str(i), A, 1 + i, 5, temperature=0) for i in range(6)]
    requests += [request("b", B, 4, 5, temperature=0), request("c", C, 2, 5, temperature=0)]
    batches: list[int] = []

    class Recorded(decode_batch.DecodeBatch):
        def __init__(self, model: object, rows: list, *rest: object):
            batches.append(len(rows))
            super().__init__(model, rows, *rest)

    monkeypatch.setattr("cartridge_forge.learning.decode.DecodeBatch", Recorded)
    done = generate(twin.model, requests, lookup(twin), NO_END)
    assert batches == [8]
    assert [c.token_ids for c in done] == [by_transformers(twin, r, NO_END) for r in requests]


@settings(max_examples=15, deadline=None)
@given(st.permutations(SAMPLED), st.integers(1, len(SAMPLED)))
def test_tokens_do_not_depend_on_the_batch(
    llama: Twin,
    alone: dict[str, Completion],
    order: Sequence[GenerateRequest],
    size: int,
) -> None:
    for c in generate(llama.model, order[:size], lookup(llama), NO_END):
        assert c.token_ids == alone[c.request_id].token_ids
        assert c.logprobs == pytest.approx(alone[c.request_id].logprobs, abs=1e-4)


def test_another_seed_gives_other_tokens(llama: Twin, alone: dict[str, Completion]) -> None:
    again = [request("k", A, 4, 14, seed=seed) for seed in (11, 12)]
    same, other = generate(llama.model, again, lookup(llama), NO_END)
    assert same.token_ids == alone["k"].token_ids
    assert other.token_ids != alone["k"].token_ids


def test_logprobs_are_those_of_a_teacher_forced_pass(twin: Twin) -> None:
    """At temperature 1 and untruncated, whatever the sampling was."""
    for r, c in zip(SAMPLED, generate(twin.model, SAMPLED, lookup(twin), NO_END), strict=True):
        kv = lookup(twin)(r.prefix)
        forced = twin.logits(r.prompt_ids + c.token_ids, kv)[len(r.prompt_ids) - 1 : -1]
        expected = forced.log_softmax(-1).gather(-1, torch.tensor(c.token_ids)[:, None])
        assert c.logprobs == pytest.approx(expected[:, 0].tolist(), abs=1e-4)


def test_sampled_tokens_follow_the_uniforms_of_their_seed(llama: Twin) -> None:
    """The draws written out for one request, from plain transformers' distributions."""
    r = request("k", A, 4, 10, seed=21)
    (c,) = generate(llama.model, [r], lookup(llama), NO_END)
    uniforms = torch.rand(10, generator=torch.Generator().manual_seed(21), dtype=torch.float64)
    tokens: list[int] = []
    for u in uniforms:
        logits = llama.logits(list(r.prompt_ids) + tokens, llama.kv["a"])[-1]
        below = logits.double().softmax(-1).cumsum(-1) <= u
        tokens.append(int(below.sum()))
    assert c.token_ids == tuple(tokens)


def test_every_token_carries_the_version_it_was_sampled_from(llama: Twin) -> None:
    held = CartridgeVersions(keep=2)
    held.add(3, {"a": 3, "b": 3}, {"a": llama.kv["a"], "b": llama.kv["a"] * 0.5})
    held.add(7, {"a": 7, "b": 3}, {"a": llama.kv["a"] * 0.9})
    requests = [
        request("x", PrefixRef("a", 7), 3, 2),
        request("y", PrefixRef("b", 3), 2, 4),
        request("z", PrefixRef("a", 3), 3, 3),
    ]
    done = generate(llama.model, requests, lambda ref: held.get(ref.name, ref.version), NO_END)
    assert [c.versions for c in done] == [(7, 7), (3, 3, 3, 3), (3, 3, 3)]


@pytest.mark.parametrize("others", [1, 6], ids=["one batch", "batches by prefix"])
def test_a_prefix_that_is_not_held_fails_its_own_requests_alone(llama: Twin, others: int) -> None:
    held = CartridgeVersions(keep=2)
    held.add(3, {"a": 3}, {"a": llama.kv["a"]})
    good = [request(f"g{i}", PrefixRef("a", 3), 3 + i, 4) for i in range(others)]
    bad = request("x", PrefixRef("a", 4), 3, 2)

    def lookup(ref: PrefixRef) -> Tensor:
        return held.get(ref.name, ref.version)

    done = generate(llama.model, [bad, *good], lookup, NO_END)
    assert done[1:] == generate(llama.model, good, lookup, NO_END)
    assert (done[0].token_ids, done[0].finish_reason) == ((), "error")
    assert done[0].error.startswith("cartridge a version 4 is not held here (held: [3])")
    assert generate(llama.model, [bad], lookup, NO_END) == done[:1]


def test_prompt_logprobs_are_those_of_plain_transformers(twin: Twin) -> None:
    """Over a prefix, rows of different length in one batch; the first prompt token has none."""
    asked = [
        replace(request(f"p{n}", PrefixRef("b", 0), n, 2), prompt_logprobs=n != 4)
        for n in (1, 9, 4)
    ]
    done = generate(twin.model, asked, lambda ref: twin.kv[ref.name], NO_END)
    assert [len(c.prompt_logprobs) for c in done] == [0, 8, 0]
    prompt = asked[1].prompt_ids
    logits = twin.logits(prompt, twin.kv["b"])
    expected = logits.log_softmax(-1)[range(8), list(prompt[1:])]
    assert [c.prompt_likeliest for c in done] == [(), tuple(logits[:8].argmax(-1).tolist()), ()]
    torch.testing.assert_close(
        torch.tensor(done[1].prompt_logprobs), expected, atol=1e-4, rtol=0, check_dtype=False
    )


def test_a_prompt_behind_nothing_is_scored_a_part_at_a_time(
    twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no prefix at all, and with logits of two positions at a time: nine tokens."""
    monkeypatch.setattr(draws, "PROMPT_LOGITS", 2 * twin.model.vocabulary)
    nothing = PrefixRef("document/", 0)
    asked = replace(request("p", nothing, 9, 3), prompt_logprobs=True, top_logprobs=2)
    layers, heads, size = twin.model.kv_shape
    (done,) = generate(
        twin.model, [asked], lambda ref: torch.zeros(layers, 2, heads, 0, size), NO_END
    )
    logits = twin.logits((*asked.prompt_ids, *done.token_ids), None).log_softmax(-1)
    read, said = logits[:8], logits[8:11]
    best = read.topk(2)
    assert [[i for i, _ in top] for top in done.prompt_top_logprobs] == best.indices.tolist()
    for told, expected in (
        (done.prompt_logprobs, read[range(8), list(asked.prompt_ids[1:])]),
        ([x for top in done.prompt_top_logprobs for _, x in top], best.values.flatten()),
        (done.logprobs, said[range(3), list(done.token_ids)]),
    ):
        torch.testing.assert_close(
            torch.tensor(told), expected, atol=1e-4, rtol=0, check_dtype=False
        )


def test_a_perturbed_cartridge_changes_the_next_output(twin: Twin) -> None:
    """Same name, same prompt, same seed: the version that the request names is what is read."""
    held = CartridgeVersions(keep=2)
    kv = twin.kv["a"]
    noise = torch.randn(kv.shape, generator=torch.Generator().manual_seed(1))
    held.add(0, {"a": 0}, {"a": kv})

    def ask(version: int, temperature: float) -> Completion:
        r = request("x", PrefixRef("a", version), 5, 12, seed=4, temperature=temperature)
        return generate(twin.model, [r], lambda f: held.get(f.name, f.version), NO_END)[0]

    before = [ask(0, 0.0), ask(0, 1.0)]
    held.add(1, {"a": 1}, {"a": kv + 0.3 * noise})
    for old, new in zip(before, [ask(1, 0.0), ask(1, 1.0)], strict=True):
        assert new.token_ids != old.token_ids
        assert new.logprobs[0] != pytest.approx(old.logprobs[0], abs=1e-3)
    assert [ask(0, 0.0), ask(0, 1.0)] == before


def test_an_empty_prompt_is_refused(llama: Twin) -> None:
    good, empty = request("x", A, 3, 2), GenerateRequest("y", (), A, Sampling(), 0)
    with pytest.raises(DataError, match="request y has an empty prompt"):
        generate(llama.model, [good, empty], lookup(llama), NO_END)


def test_no_request_no_completion(llama: Twin) -> None:
    assert generate(llama.model, [], lookup(llama), NO_END) == []


@pytest.mark.parametrize(
    ("sampling", "uniforms", "expected"),
    [
        # Untruncated: in order of token id, boundaries at .125, .625, .875.
        ({}, [0.0, 0.12, 0.13, 0.62, 0.63, 0.87, 0.88, ALMOST_ONE], [0, 0, 1, 1, 2, 2, 3, 3]),
        # Truncated: most likely first. Top 2 of (.5, .25) is (2/3, 1/3).
        ({"top_k": 2}, [0.0, 0.66, 0.67, ALMOST_ONE], [1, 1, 2, 2]),
        # Equally likely: the lower id is kept. (.5, .25, .125) / .875: boundaries 4/7, 6/7.
        ({"top_k": 3}, [0.0, 0.57, 0.58, 0.85, 0.86, ALMOST_ONE], [1, 1, 2, 2, 0, 0]),
        # .5 is below .6, so the second is needed; .75 is not, so the third is not.
        ({"top_p": 0.6}, [0.0, 0.66, 0.67, ALMOST_ONE], [1, 1, 2, 2]),
        # .5 reaches .4 alone.
        ({"top_p": 0.4}, [0.0, 0.5, ALMOST_ONE], [1, 1, 1]),
        # The most likely token is kept, however small the nucleus.
        ({"top_p": 1e-12}, [0.0, ALMOST_ONE], [1, 1]),
        # Top k first: of (4/7, 2/7, 1/7) two make .857 >= .8. The other way three would be left.
        ({"top_k": 3, "top_p": 0.8}, [0.0, 0.66, 0.67, ALMOST_ONE], [1, 1, 2, 2]),
        # More than there are.
        ({"top_k": 9}, [0.0, 0.49, 0.51, ALMOST_ONE], [1, 1, 2, 3]),
        # Temperature 1/2 squares: (1, 16, 4, 1) / 22, boundaries .0455, .7727, .9545.
        (
            {"temperature": 0.5},
            [0.045, 0.046, 0.772, 0.773, 0.954, 0.955],
            [0, 1, 1, 2, 2, 3],
        ),
        # Temperature before top p: 16/22 = .727 reaches .7 alone, .5 would not have.
        ({"temperature": 0.5, "top_p": 0.7}, [0.0, ALMOST_ONE], [1, 1]),
    ],
)
def test_draws_worked_by_hand(
    sampling: dict[str, float], uniforms: list[float], expected: list[int]
) -> None:
    assert drawn(HALVES, uniforms, **sampling) == expected


def test_no_uniform_draws_an_impossible_token() -> None:
    edges = [0.0, 0.5, ALMOST_ONE]
    assert drawn([0, 0.25, 0.75, 0], edges) == [1, 2, 2]
    assert drawn([0, 0.25, 0.75, 0], edges, top_p=0.99) == [2, 2, 1]
    assert drawn([0, 0, 1, 0], edges, top_k=3) == [2, 2, 2]


@given(weights, st.sampled_from([{}, {"top_k": 50}, {"top_p": 1 - 1e-9}]))
def test_a_grid_of_uniforms_gives_the_probabilities_exactly(
    counts: list[int], sampling: dict[str, float]
) -> None:
    """With p_v = counts[v] / n, the n midpoints (i + 1/2) / n draw v exactly counts[v] times:
    each token owns an interval of length p_v, and its edges lie on the grid's cell borders."""
    n = sum(counts)
    tokens = drawn(counts, [(i + 0.5) / n for i in range(n)], **sampling)
    assert [tokens.count(v) for v in range(len(counts))] == counts


@given(
    weights,
    st.integers(0, 13),
    st.integers(1, 99),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20),
)
def test_no_draw_leaves_the_nucleus(
    counts: list[int], top_k: int, percent: int, uniforms: list[float]
) -> None:
    """The nucleus by exact fractions: the top k, then the fewest whose mass reaches top_p."""
    ranked = sorted(range(len(counts)), key=lambda v: (-counts[v], v))[: top_k or None]
    total, mass, nucleus = sum(counts[v] for v in ranked), Fraction(0), set()
    for v in ranked:
        # A mass that equals top_p to the last digit may fall on either side in floating point.
        if mass <= Fraction(percent, 100):
            nucleus.add(v)
        mass += Fraction(counts[v], total)
    uniforms = [*uniforms, 0.0, ALMOST_ONE]
    tokens = drawn(counts, uniforms, top_k=top_k, top_p=percent / 100)
    assert set(tokens) <= nucleus
    assert all(counts[v] > 0 for v in tokens)
