"""References of the policy gradient: whose they are, when they are renewed, what a resume keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from channel_setup import bank_of, changed, prefixes, scene, scored, trained
from torch import Tensor
from twins import NEAR

from cartridge_forge.learning.checkpoint import read_checkpoint
from cartridge_forge.learning.teacher import (
    TeacherDistribution,
    joined,
    response_logprobs,
    score,
    score_kept,
)
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective, GrpoSpec
from cartridge_forge.plugins.objectives.policy_scores import document_logprobs
from cartridge_forge.protocols.errors import CheckpointError, DataError
from cartridge_forge.protocols.spec.sections import TrainSpec
from cartridge_forge.protocols.step import TrainBatch

if TYPE_CHECKING:
    from twins import Twin

RL = EpisodesObjective(w_doc=0.0, w_rl=1.0)
INITIAL = GrpoSpec(kl=0.5, zero_variance="keep", mismatch=None)
EVERY_TWO = INITIAL.model_copy(update={"kl_reference": "version", "kl_refresh": 2})


def trainer_of(twin: Twin, spec: GrpoSpec, last_state: Path | None = None) -> CartridgeTrainer:
    trainer = CartridgeTrainer(
        twin.model, bank_of(twin), TrainSpec(steps=5, lr=0.02, row_tokens=24), last_state,
        objective=changed(RL, grpo=spec),
    )  # fmt: skip
    if last_state is None or not last_state.exists():
        trainer.begin("rl", 5)
    return trainer


def lesson(twin: Twin, version: int) -> TrainBatch:
    return scored(scene(twin, bank_of(twin), version, version), ref=None)


def logprobs(twin: Twin, batch: TrainBatch, kv: dict[str, Tensor]) -> Tensor:
    """Of the trained tokens of episodes with a reward, in float64."""
    samples = [r.sample for r in batch.rl]
    found = [
        twin.response_logits(s, kv[s.cartridge]).double().log_softmax(-1).gather(
            -1, torch.tensor(s.response_ids)[:, None])[:, 0]
        for s in samples
    ]  # fmt: skip
    own = [torch.tensor(r.trained) for r in batch.rl]
    pairs = zip(found, own, batch.rl, strict=True)
    return torch.cat([x[mine] for x, mine, r in pairs if r.reward is not None]).detach()


@pytest.mark.parametrize(
    ("spec", "at_reference"), [(INITIAL, (True, False, False)), (EVERY_TWO, (True, False, True))]
)
def test_the_divergence_is_from_the_reference_s_own_numbers(
    llama: Twin, spec: GrpoSpec, at_reference: tuple[bool, ...]
) -> None:
    trainer = trainer_of(llama, spec)
    reference = prefixes(trainer.bank)
    for v, same in enumerate(at_reference):
        if spec.kl_refresh and v % spec.kl_refresh == 0:
            reference = prefixes(trainer.bank)
        batch = lesson(llama, v)
        d = logprobs(llama, batch, reference) - logprobs(llama, batch, prefixes(trainer.bank))
        expected = (d.exp() - d - 1).mean().item()
        found = trainer.step(batch, v).terms["grpo"]["k3"]
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert (found < 1e-6) == same


@pytest.mark.parametrize("spec", [INITIAL, EVERY_TWO])
def test_a_resumed_run_keeps_its_reference(llama: Twin, tmp_path: Path, spec: GrpoSpec) -> None:
    calm = trainer_of(llama, spec, tmp_path / "state")
    done = [calm.step(lesson(llama, v), v) for v in range(3)]
    path = calm.save(tmp_path, {}, 3)
    done.append(calm.step(lesson(llama, 3), 3))
    resumed = trainer_of(llama, spec)
    resumed.restore(read_checkpoint(path))
    replaced = trainer_of(llama, spec, tmp_path / "state")
    assert replaced.recover() == 4
    assert resumed.step(lesson(llama, 3), 3) == done[3] == replaced.step(lesson(llama, 3), 3)
    for trainer in (resumed, replaced):
        assert torch.equal(trained(trainer.bank), trained(calm.bank))
        ours, theirs = trainer._state.reference, calm._state.reference
        assert ours is not None
        assert theirs is not None
        assert all(torch.equal(ours[name], theirs[name]) for name in "ab")


def test_a_checkpoint_without_a_reference_is_refused(llama: Twin, tmp_path: Path) -> None:
    plain = trainer_of(llama, GrpoSpec())
    plain.step(TrainBatch(), 0)
    state = read_checkpoint(plain.save(tmp_path, {}, 1))
    assert "reference" not in state.cartridge("a")
    with pytest.raises(CheckpointError, match=r"no reference for objective\.grpo\.kl"):
        trainer_of(llama, INITIAL).restore(state)


def of_document(twin: Twin, keep_top: int | None, keep_sampled: bool) -> TrainBatch:
    """Episodes that the document teacher read, with its scores."""
    batch = lesson(twin, 0)
    samples = [r.sample for r in batch.rl]
    kept = score_kept(twin.model, samples, twin.kv, 64, keep_top, keep_sampled=keep_sampled)
    return replace(batch, doc=samples, scores={"doc_teacher": TeacherDistribution(**kept)})


@pytest.mark.parametrize(("keep_top", "keep_sampled"), [(None, False), (1, True), (5, True)])
def test_the_document_teacher_tells_what_was_sampled(
    llama: Twin, keep_top: int | None, keep_sampled: bool
) -> None:
    """Also outside its top entries: random tokens are hardly ever its first."""
    batch = of_document(llama, keep_top, keep_sampled)
    teacher = batch.scores["doc_teacher"]
    found = document_logprobs(batch, teacher)
    samples = [r.sample for r in batch.rl]
    whole = score(llama.model, samples, llama.cached(), 64).log_softmax(-1)
    targets = torch.tensor([t for s in samples for t in s.response_ids])
    torch.testing.assert_close(found, whole.gather(-1, targets[:, None])[:, 0])
    assert (whole.argmax(-1) != targets).any()
    # In parts and out of order, as teachers reply.
    parts = [
        (of, TeacherDistribution(**score_kept(
            llama.model, [samples[i] for i in of], llama.kv, 64, keep_top,
            keep_sampled=keep_sampled)))
        for of in ((5, 0, 2), (1, 4, 3))
    ]  # fmt: skip
    again = joined(parts, [len(s.response_ids) for s in samples])
    torch.testing.assert_close(document_logprobs(batch, again), found, rtol=0, atol=NEAR)


def test_scores_of_other_samples_are_no_reference(llama: Twin) -> None:
    batch = of_document(llama, 2, True)
    with pytest.raises(DataError, match="read other samples than the episodes"):
        document_logprobs(replace(batch, doc=batch.doc[1:]), batch.scores["doc_teacher"])
    without = of_document(llama, 2, False)
    with pytest.raises(DataError, match="lack the sampled tokens' own log-probabilities"):
        document_logprobs(without, without.scores["doc_teacher"])


def test_the_document_as_reference_and_as_reward(llama: Twin) -> None:
    """k3 to the model with the document, and what a nat from it costs, by their formulas."""
    batch = of_document(llama, 1, True)
    document = document_logprobs(batch, batch.scores["doc_teacher"])
    batch = scored(batch, document=document)
    own = response_logprobs(llama.model, [r.sample for r in batch.rl], prefixes(bank_of(llama)), 64)
    counted = torch.tensor([o and r.reward is not None for r in batch.rl for o in r.trained])
    d = (document - own)[counted]
    by_document = GrpoSpec(kl=0.5, kl_reference="document", zero_variance="keep", mismatch=None)
    found = trainer_of(llama, by_document).step(batch, 0).terms["grpo"]
    assert found["k3"] == pytest.approx((d.exp() - d - 1).mean().item(), rel=1e-4)
    plain = trainer_of(llama, INITIAL).step(batch, 0).terms["grpo"]
    priced = GrpoSpec(distill=0.25, zero_variance="keep", mismatch=None)
    paid = trainer_of(llama, priced).step(batch, 0).terms["grpo"]
    assert paid["distilled"] == pytest.approx(-d.mean().item(), rel=1e-4)
    assert paid["value"] == pytest.approx(plain["value"] - 0.25 * d.mean().item(), rel=1e-4)
    with pytest.raises(DataError, match="the batch has no document"):
        trainer_of(llama, priced).step(scored(batch, document=None), 0)
