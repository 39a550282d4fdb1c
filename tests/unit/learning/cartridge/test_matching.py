"""Test attention matching, and versions of cartridges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from twins import NEAR

from cartridge_forge.learning.attention import AttentionOptions, FlatAttention
from cartridge_forge.learning.batch import pack, response_logits
from cartridge_forge.learning.cartridge import CartridgeVersions, VersionLedger, shifted
from cartridge_forge.plugins.library.attention_matching import (
    DIRECTION_RIDGE,
    FEEDBACK_RIDGE,
    LEAST_BIAS,
    MOST_BIAS,
    UPDATES,
    VALUE_RIDGE,
    HeadQueries,
    attention_added,
    attention_matched,
    bias_direction,
    compacted,
    feedback,
    fitted_head,
    mass_weights,
)
from cartridge_forge.plugins.library.reference_rows import (
    MOST_ROWS,
    ROW,
    StudyPrompts,
    document_rows,
    row_starts,
    study_rows,
)
from cartridge_forge.protocols.errors import PublishError
from cartridge_forge.protocols.step import PrefixRef, composed_ref

if TYPE_CHECKING:
    from collections.abc import Callable

    from twins import Twin

    from cartridge_forge.protocols.step import Sample

    MakeSamples = Callable[..., list[Sample]]

PLAIN = AttentionOptions(1.0)
STUDY = StudyPrompts(((5, 9, 31), (4, 8), (60, 7, 7, 12)), frozenset({2}))


def logits_over(twin: Twin, samples: list[Sample], kv: Tensor) -> Tensor:
    packed = pack(samples, {"a": kv.shape[3]}, 40)
    return response_logits(twin.model, packed, [kv])


def missed(twin: Twin, samples: list[Sample], kv: Tensor) -> float:
    """How far the logits over a cartridge are from the document's, mean square."""
    expected = torch.cat([twin.response_logits(s, twin.kv["a"]) for s in samples])
    return (logits_over(twin, samples, kv) - expected).square().mean().item()


@pytest.mark.parametrize("study", [StudyPrompts(), STUDY])
def test_as_many_tokens_as_the_document_are_the_document(
    twin: Twin, make_samples: MakeSamples, study: StudyPrompts
) -> None:
    kv = twin.kv["a"]
    made = attention_matched(twin.model, twin.documents["a"], kv, kv.shape[3], 1, study)
    torch.testing.assert_close(made, kv, rtol=0, atol=1e-3)  # weights of mass in float32
    samples = make_samples(("a", 4, 6), ("a", 2, 3))
    expected = torch.cat([twin.response_logits(s, kv) for s in samples])
    torch.testing.assert_close(logits_over(twin, samples, made), expected, rtol=0, atol=1e-3)


def test_a_request_sees_the_kept_keys_as_if_it_stood_behind_the_document(twin: Twin) -> None:
    """The first 10 of 24 tokens, moved by 10 - 24, before a request at 10: equal to a request at 24
    that sees those 10 alone."""
    kv, ids = twin.kv["a"][:, :, :, :10], torch.tensor([5, 9, 31])

    def hidden(prefix: Tensor, first: int) -> Tensor:
        positions = torch.arange(first, first + 3)
        return twin.model(ids, positions, FlatAttention([3], [1], positions, [prefix]))

    moved = shifted(kv, 10 - 24, twin.model.frequencies())
    torch.testing.assert_close(hidden(moved, 10), hidden(kv, 24), rtol=0, atol=NEAR)
    assert not torch.allclose(hidden(kv, 10), hidden(kv, 24), atol=1e-2)


def head_of(n: int, size: int, options: AttentionOptions = PLAIN) -> HeadQueries:
    """Random queries, of which each one's first number is 1, at positions from 12 on."""
    draws = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws)

    queries = drawn(n, size)
    queries[:, 0] = 1.0
    at = torch.arange(n) % 4
    return HeadQueries(
        queries,
        drawn(n),
        drawn(n, size),
        drawn(n, size),
        at + 12,
        at + 5,
        options,
    )


def reference_weights(shares: Tensor, wanted: Tensor, fixed: Tensor) -> Tensor:
    """Lee and Seung's updates of min |A w + f - t|, a query and a key at a time, in float64."""
    weights = torch.ones(shares.shape[1], dtype=torch.float64)
    for _ in range(UPDATES):
        read = shares @ weights + fixed
        weights = torch.stack(
            [
                w * (a * wanted).sum() / (a * read).sum()
                for a, w in zip(shares.T, weights, strict=True)
            ]
        )
    return weights


def masked(scores: Tensor, positions: Tensor, options: AttentionOptions) -> Tensor:
    """Scores with the cap, and without keys that lie outside of the window."""
    if options.cap is not None:
        scores = options.cap * (scores / options.cap).tanh()
    if options.window is not None:
        behind = positions[:, None] - torch.arange(scores.shape[1])
        scores = scores.masked_fill(behind >= options.window, -torch.inf)
    return scores


@pytest.mark.parametrize(
    "options", [PLAIN, AttentionOptions(1.0, window=8), AttentionOptions(1.0, cap=3.0)]
)
def test_a_head_s_fit_is_that_of_a_reference_in_float64(options: AttentionOptions) -> None:
    """12 keys of 6 numbers in 5: one is known, four are chosen of the others."""
    head, tokens = head_of(40, 6, options), 4
    draws = torch.Generator().manual_seed(5)
    document = torch.randn(2, 12, 6, generator=draws)
    known = document[:, :1]
    direction = torch.tensor([1.0, 0, 0, 0, 0, 0])
    made = fitted_head(head, document, known, direction, tokens, 1).double()

    queries, own = head.queries.double(), head.own_sums.double()
    keys, values = document.double()
    whole = masked(queries @ keys.T, head.positions, options)
    total = torch.logaddexp(whole.logsumexp(-1), own)
    squares = (whole - total[:, None]).exp().square().sum(0)
    chosen = (squares[1:].topk(tokens).indices + 1).sort().values
    kept = torch.cat([torch.tensor([0]), chosen])
    shares = (masked(queries @ keys[kept].T, head.kept_positions, options) - total[:, None]).exp()
    mass = (whole.logsumexp(-1) - total).exp()
    weights = reference_weights(shares[:, 1:], mass, shares[:, 0])
    biases = weights.log().clamp(LEAST_BIAS, MOST_BIAS)
    # The first number of every query is 1, so a bias added to that of a key is one of the score.
    expected_keys = keys[chosen] + biases[:, None] * direction
    torch.testing.assert_close(made[0], expected_keys, rtol=0, atol=1e-4)

    scores = masked(queries @ torch.cat([keys[:1], expected_keys]).T, head.kept_positions, options)
    total = torch.logaddexp(scores.logsumexp(-1), own)
    attention = (scores - total[:, None]).exp()
    read = attention @ values[kept] + (own - total).exp()[:, None] * head.own_outputs
    on_kept = attention[:, 1:]
    ridge = (VALUE_RIDGE * (on_kept.square().sum(0)).mean()).sqrt()
    rows = torch.cat([on_kept, ridge * torch.eye(tokens, dtype=torch.float64)])
    lacking = head.targets - read
    right = torch.cat([lacking, torch.zeros(tokens, 6, dtype=torch.float64)])
    moved = torch.linalg.lstsq(rows, right).solution
    torch.testing.assert_close(made[1], values[chosen] + moved, rtol=0, atol=1e-3)


def test_a_folded_bias_is_that_of_the_score() -> None:
    """Queries with a part that is the same in all: the direction has q.u = 1, but for the ridge."""
    draws = torch.Generator().manual_seed(0)
    queries = torch.randn(200, 8, generator=draws, dtype=torch.float64)
    queries[:, 3:5] = torch.tensor([2.0, -1.0])
    direction = bias_direction(queries.T @ queries, queries.sum(0))
    torch.testing.assert_close(queries @ direction, torch.ones(200).double(), rtol=0, atol=0.02)
    ridge = DIRECTION_RIDGE * queries.square().sum(0).mean()
    rows = torch.cat([queries, ridge.sqrt() * torch.eye(8, dtype=torch.float64)])
    right = torch.cat([torch.ones(200), torch.zeros(8)]).double()[:, None]
    torch.testing.assert_close(direction[:, None], torch.linalg.lstsq(rows, right).solution)


def test_weights_of_mass_by_hand() -> None:
    """Two kept keys that no query sees together: A is diagonal, and w = (t - f) / a, or none where
    what is there already has more than the mass. One update reaches 6 / (2 + 0), 4 / (1 + 0)."""
    gram = torch.tensor([[4.0, 0.0], [0.0, 1.0]]).double()
    wanted, nothing = torch.tensor([12.0, 4.0]).double(), torch.zeros(2).double()
    assert mass_weights(gram, wanted, nothing).tolist() == pytest.approx([3, 4])
    fixed = torch.tensor([4.0, 8.0]).double()
    weights = mass_weights(gram, wanted, fixed)
    assert weights[0] == pytest.approx(2)
    assert 0 <= weights[1] < 1e-6


def test_what_tokens_lack_is_asked_through_the_output_projection() -> None:
    draws = torch.Generator().manual_seed(1)
    weight, lacking = torch.randn(6, 4, generator=draws), torch.randn(3, 6, generator=draws)
    asked = feedback(weight, lacking, lambda x: x).double()
    wide = weight.double()
    ridge = FEEDBACK_RIDGE * wide.square().sum(1).mean()
    rows = torch.cat([wide, ridge.sqrt() * torch.eye(4, dtype=torch.float64)])
    right = torch.cat([lacking.double().T, torch.zeros(4, 3, dtype=torch.float64)])
    expected = torch.linalg.lstsq(rows, right).solution.T
    torch.testing.assert_close(asked, expected, rtol=0, atol=1e-5)


def test_frozen_entries_are_the_document_s_first(twin: Twin) -> None:
    kv = twin.kv["a"]
    made = attention_matched(twin.model, twin.documents["a"], kv, 12, 3, STUDY)
    moved = shifted(kv, 12 - 24, twin.model.frequencies())
    torch.testing.assert_close(made[:, :, :, :3], moved[:, :, :, :3])


def test_the_rest_of_a_document_beside_its_beginning_is_the_document(
    twin: Twin, make_samples: MakeSamples
) -> None:
    """A cartridge of the first 10 of 24 tokens with 14 added."""
    kv = twin.kv["a"]
    given = shifted(kv[:, :, :, :10], 0, twin.model.frequencies())
    added = attention_added(twin.model, twin.documents["a"], kv, given, 14)
    assert added.shape[3] == 14
    samples = make_samples(("a", 4, 6), ("a", 2, 3))
    both = torch.cat([given, added], dim=3)
    alone = shifted(given, 14, twin.model.frequencies())  # a prompt at 24
    assert missed(twin, samples, both) < 0.5 * missed(twin, samples, alone)


def test_rows_in_bfloat16_make_nearly_the_same_cartridge(llama: Twin) -> None:
    model = llama.model
    rows = document_rows(llama.documents["a"])
    made = compacted(model, llama.kv["a"], 12, 1, rows)
    narrow = compacted(model, llama.kv["a"].bfloat16(), 12, 1, rows)
    assert narrow.dtype == torch.float32, "as the model's pass"
    assert (narrow - made).square().mean() < 0.05 * made.square().mean()


def test_every_part_of_a_long_document_is_represented() -> None:
    assert row_starts(40) == [0]
    assert row_starts(70) == [0, 6]
    assert row_starts(3 * ROW) == [0, ROW, 2 * ROW]
    many = row_starts((MOST_ROWS - 1) * 2 * ROW + ROW)
    assert len(many) == MOST_ROWS
    assert many == [2 * ROW * i for i in range(MOST_ROWS)]


def test_a_study_row_is_a_prompt_with_the_document_model_s_likeliest_answer(twin: Twin) -> None:
    kv = twin.kv["a"]
    rows = study_rows(twin.model, kv, STUDY, 6)
    for prompt, row in zip(STUDY.prompts, rows, strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + 6 and ids[-1] not in STUDY.end_ids:
            ids.append(int(twin.logits(ids, kv)[-1].argmax()))
        assert row.ids == tuple(ids)


NAMES = ("a", "b")


def kv(version: int) -> dict[str, torch.Tensor]:
    """[1, 2, 1, 1, 1] each: 10 v for "a", 10 v + 1 for "b"."""
    return {n: torch.full((1, 2, 1, 1, 1), 10.0 * version + i) for i, n in enumerate(NAMES)}


def all_since(version: int) -> dict[str, int]:
    return dict.fromkeys(NAMES, version)


def held(*versions: int, keep: int = 2) -> CartridgeVersions:
    store = CartridgeVersions(keep)
    for version in versions:
        store.add(version, all_since(version), kv(version))
    return store


def test_a_version_is_read_by_name() -> None:
    store = held(0, 3)
    assert store.get("a", 0).flatten().tolist() == [0, 0]
    assert store.get("b", 0).flatten().tolist() == [1, 1]
    assert store.get("b", 3).flatten().tolist() == [31, 31]
    assert store.get("b", 3).shape == (1, 2, 1, 1, 1)


def test_the_newest_are_kept_and_the_oldest_evicted() -> None:
    store = held(*range(1000), keep=3)
    assert {version for _, version in store._kv} == {997, 998, 999}
    with pytest.raises(
        PublishError,
        match=r"cartridge a version 996 is not held here \(held: \[997, 998, 999\]\): it was never "
        "loaded by this generator, or was evicted",
    ):
        store.get("a", 996)


def test_a_version_not_loaded_yet_is_not_replaced_by_another() -> None:
    with pytest.raises(PublishError, match=r"cartridge b version 5 is not held here \(held: \[4\]"):
        held(4).get("b", 5)


@pytest.mark.parametrize("again", [4, 3, 0])
def test_a_number_is_never_reused_and_never_goes_back(again: int) -> None:
    store = held(3, 4)
    with pytest.raises(
        PublishError, match=f"version {again} was offered after version 4: .* publish a new one"
    ):
        store.add(again, all_since(again), kv(9))
    assert store.get("a", 4).flatten().tolist() == [40, 40]


def test_a_number_stays_taken_after_its_eviction() -> None:
    store = held(1, 2, 3, keep=1)
    with pytest.raises(PublishError, match="version 1 was offered after version 3"):
        store.add(1, all_since(1), kv(1))


def test_an_unknown_cartridge_of_a_held_version() -> None:
    with pytest.raises(PublishError, match=r"version 4 has no cartridge 'z'; it has \('a', 'b'\)"):
        held(4).get("z", 4)


A0, A1, B0 = PrefixRef("cartridge/a", 0), PrefixRef("cartridge/a", 1), PrefixRef("cartridge/b", 0)


def test_an_evicted_version_is_let_go_of_when_its_last_request_ends() -> None:
    ledger = VersionLedger(keep=1)
    assert ledger.add(0, {"a": 0}, {"a"}) == []
    ledger.begin(A0)
    ledger.begin(A0)
    assert ledger.add(1, {"a": 1}, {"a"}) == [], "two requests still read version 0"
    with pytest.raises(PublishError, match="version 0 is not held here"):
        ledger.since("a", 0)
    assert ledger.end(A0) == []
    assert ledger.end(A0) == [("a", 0)]
    ledger.begin(A1)
    assert ledger.end(A1) == [], "nobody reads version 1, but it may still be asked for"
    assert ledger.add(2, {"a": 2}, {"a"}) == [("a", 1)]


def test_what_did_not_change_is_held_once_and_stays() -> None:
    """b's numbers are those of version 0 until version 3; each version has its own a."""
    store = CartridgeVersions(keep=2)
    store.add(0, {"a": 0, "b": 0}, kv(0))
    for version in (1, 2):
        since = {"a": version, "b": 0}
        assert store.missing(since) == {"a"}
        store.add(version, since, {"a": kv(version)["a"]})
    assert sorted(store._kv) == [("a", 1), ("a", 2), ("b", 0)]
    assert store.get("b", 2) is store.get("b", 1)
    assert store.get("b", 2).flatten().tolist() == [1, 1]
    assert store.get("a", 2).flatten().tolist() == [20, 20]
    store.add(3, {"a": 2, "b": 3}, {"b": kv(3)["b"]})
    assert sorted(store._kv) == [("a", 2), ("b", 0), ("b", 3)], "version 2 still has b since 0"
    assert store.get("a", 3) is store.get("a", 2)
    store.add(4, {"a": 2, "b": 3}, {})
    assert sorted(store._kv) == [("a", 2), ("b", 3)]


def test_a_late_reader_misses_all_that_its_first_version_has() -> None:
    store = CartridgeVersions(keep=2)
    since = {"a": 6, "b": 2}
    assert store.missing(since) == {"a", "b"}
    with pytest.raises(PublishError, match=r"version 7 .* not held here \(b since 2\); publish it"):
        store.add(7, since, {"a": kv(6)["a"]})
    store.add(7, since, {"a": kv(6)["a"], "b": kv(2)["b"]})
    assert (store.get("a", 7)[0, 0].item(), store.get("b", 7)[0, 0].item()) == (60, 21)


def test_held_numbers_are_not_replaced() -> None:
    store = held(3)
    with pytest.raises(PublishError, match=r"not held here \(a since 3\)"):
        store.add(4, {"a": 3, "b": 4}, kv(9))
    assert store.get("a", 3).flatten().tolist() == [30, 30]


def test_a_request_holds_what_it_reads_and_no_more() -> None:
    ledger = VersionLedger(keep=1)
    ledger.add(0, {"a": 0, "b": 0}, {"a", "b"})
    both = composed_ref([A0, PrefixRef("document/d", 5), B0])
    assert ledger.resolved(both) == both
    ledger.begin(A0)
    ledger.begin(both)
    assert ledger.add(1, {"a": 1, "b": 1}, {"a", "b"}) == []
    assert ledger.end(both) == [("b", 0)]
    assert ledger.end(A0) == [("a", 0)]


def test_a_prefix_is_resolved_to_when_its_parts_changed() -> None:
    ledger = VersionLedger(keep=3)
    ledger.add(6, {"a": 6, "b": 2}, {"a", "b"})
    ledger.add(7, {"a": 6, "b": 7}, {"b"})
    asked = composed_ref(
        [PrefixRef("cartridge/b", 6), PrefixRef("cartridge/a", 7), PrefixRef("document/a", 7)]
    )
    assert ledger.resolved(asked) == composed_ref(
        [PrefixRef("cartridge/b", 2), PrefixRef("cartridge/a", 6), PrefixRef("document/a", 7)]
    )
    assert ledger.drop(6) == [("b", 2)]
    with pytest.raises(PublishError, match="cartridge b version 6 is not held here"):
        ledger.resolved(asked)
