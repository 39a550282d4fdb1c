"""Scoring over cartridges: hinted turns and references, against plain transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from channel_setup import bank_of, prefixes, scene
from twins import NEAR

from learning import ranks as cores
from learning.batch import token_logprobs
from learning.losses.dpo import with_references
from learning.ranks import concurrently
from learning.teacher import (
    DocumentKVCache,
    contexts_of,
    document_kv,
    response_logprobs,
    score,
    score_kept,
    score_over,
    top_k,
)
from protocols.errors import DataError
from protocols.train_batch import hinted

if TYPE_CHECKING:
    from collections.abc import Callable

    from twins import Twin

    from protocols.types import Sample

    MakeSamples = Callable[..., list[Sample]]


@pytest.mark.parametrize("row_tokens", [16, 64])
def test_the_hinted_teacher_is_the_model_reading_cartridge_hint_and_turn(
    twin: Twin, row_tokens: int
) -> None:
    bank = bank_of(twin)
    batch, kv = scene(twin, bank), prefixes(bank)
    found = score_over(twin.model, hinted(batch.turns, batch.rl), kv, row_tokens)
    by_id = {r.sample.id: r.sample for r in batch.rl}
    expected = []
    for item in batch.turns:
        s = by_id[item.sample]
        turn = s.response_ids[item.start : item.stop]
        logits = twin.logits(item.context_ids + turn, kv[s.cartridge])
        expected.append(logits[len(item.context_ids) - 1 : -1])
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=5e-5)


def test_response_logprobs_are_the_log_softmax_of_score(
    twin: Twin, make_samples: MakeSamples
) -> None:
    samples = make_samples(("a", 4, 5), ("b", 2, 3))
    kv = {name: twin.kv[name] for name in "ab"}
    logits = score_over(twin.model, samples, kv, 20)
    torch.testing.assert_close(
        logits, score(twin.model, samples, twin.cached(), 20), rtol=0, atol=NEAR
    )
    picked = [
        row.log_softmax(-1)[token].item()
        for row, token in zip(logits, [t for s in samples for t in s.response_ids], strict=True)
    ]
    found = response_logprobs(twin.model, samples, kv, 20)
    assert not found.requires_grad
    assert found.tolist() == pytest.approx(picked, abs=NEAR)


@pytest.mark.parametrize("chunk", [None, 3])
def test_what_is_kept_of_a_score_is_its_top_or_all(
    twin: Twin, make_samples: MakeSamples, monkeypatch: pytest.MonkeyPatch, chunk: int | None
) -> None:
    """Also where the logits of three tokens exist at a time."""
    if chunk:
        monkeypatch.setattr("learning.teacher.LOGIT_BYTES", chunk * 97 * 4)
    samples = make_samples(("a", 4, 5), ("b", 2, 3))
    logits = score(twin.model, samples, twin.cached(), 20)
    kv = contexts_of(samples, twin.cached())
    assert torch.equal(score_kept(twin.model, samples, kv, 20, None)["logits"], logits)
    kept, expected = score_kept(twin.model, samples, kv, 20, 6), top_k(logits, 6)
    assert not kept["logprobs"].requires_grad
    assert torch.equal(kept["indices"], expected[0])
    torch.testing.assert_close(kept["logprobs"], expected[1], rtol=0, atol=2e-6 if chunk else 0)
    ours = response_logprobs(twin.model, samples, kv, 20)
    targets = torch.tensor([t for s in samples for t in s.response_ids])
    torch.testing.assert_close(ours, token_logprobs(logits, targets), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("keep_top", "keep_sampled"), [(None, False), (6, False), (6, True)])
def test_parts_scored_beside_each_other_are_the_whole(
    twin: Twin, make_samples: MakeSamples, monkeypatch: pytest.MonkeyPatch,
    keep_top: int | None, keep_sampled: bool,
) -> None:  # fmt: skip
    """Samples of two prefixes in turn: a part has those of one, and the rows come back in order."""
    samples = make_samples(("a", 4, 5), ("b", 2, 3), ("a", 3, 2), ("b", 5, 4))
    kv = contexts_of(samples, twin.cached())

    def kept() -> dict[str, torch.Tensor]:
        return score_kept(twin.model, samples, kv, 20, keep_top, keep_sampled=keep_sampled)

    ran: list[int] = []

    def noted(work: Any, parts: Any, passes: int) -> Any:
        ran.append(len(parts))
        return concurrently(work, parts, passes)

    monkeypatch.setattr("learning.teacher.concurrently", noted)
    monkeypatch.setattr(cores, "LEAST_TOKENS", 10)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = kept()
        torch.set_num_threads(2)
        parts = kept()
    finally:
        torch.set_num_threads(before)
    assert ran == [1, 2]
    assert list(parts) == list(whole)
    for name, value in parts.items():
        assert not value.requires_grad
        torch.testing.assert_close(value, whole[name], rtol=0, atol=NEAR)


def test_references_are_recomputed_where_stale(twin: Twin) -> None:
    bank = bank_of(twin)
    kv = prefixes(bank)
    fresh, stale = scene(twin, bank).pairs
    fresh = replace(fresh, ref_version=4, ref_chosen=-1.0)
    stale = replace(stale, ref_version=1)
    kept, renewed = with_references(twin.model, [fresh, stale], kv, 32, version=5, max_age=1)
    assert kept is fresh
    assert renewed.ref_version == 5
    for ids, reference in ((stale.chosen_ids, renewed.ref_chosen),
                           (stale.rejected_ids, renewed.ref_rejected)):  # fmt: skip
        logits = twin.logits(stale.context_ids + ids, kv[stale.cartridge])
        rows = logits[len(stale.context_ids) - 1 : -1].log_softmax(-1)
        expected = sum(row[token].item() for row, token in zip(rows, ids, strict=True))
        assert reference == pytest.approx(expected, abs=1e-4)
    assert with_references(twin.model, [stale], kv, 32, version=5, max_age=None) == [stale]
    assert with_references(twin.model, [], kv, 32, version=5, max_age=0) == []


def test_tokens_that_the_model_has_not_are_refused_before_a_pass(
    twin: Twin, make_samples: MakeSamples
) -> None:
    (sample,) = make_samples(("a", 4, 5))
    for part in ("prompt", "response"):
        ids = (*getattr(sample, f"{part}_ids")[:-1], twin.model.vocabulary)
        wrong = replace(sample, **{f"{part}_ids": ids})
        with pytest.raises(DataError, match=f"the {part} of sample {sample.id} has the token id"):
            score(twin.model, [wrong], twin.cached(), 20)
    cache = DocumentKVCache(lambda ids: document_kv(twin.model, ids), {"d": (6, 9_999)}, 1 << 20)
    with pytest.raises(DataError, match=r"document d: .* has the token id 9999 at 1"):
        cache.get("d")
