"""Several updates on one rollout: its division, the ratio that it makes real, and what is told."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from channel_setup import (
    ALL,
    bank_of,
    changed,
    ids,
    of_cartridge,
    prefixes,
    scene,
    scored,
    trained,
    whole_kv,
    with_sampler,
)
from torch import Tensor
from twins import NEAR

from cartridge_forge.learning.checkpoint import read_checkpoint
from cartridge_forge.learning.teacher import response_logprobs
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.episodes.losses.advantages import group_advantages
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective, GrpoSpec, SdpoSpec
from cartridge_forge.plugins.objectives.policy_scores import shared_logprobs
from cartridge_forge.plugins.objectives.updates import divide, joined_output
from cartridge_forge.protocols.errors import RunError, StaleTokenError
from cartridge_forge.protocols.spec.sections import TrainSpec
from cartridge_forge.protocols.step import Sample, TrainBatch, TrainStepOutput

if TYPE_CHECKING:
    from twins import Twin

RL = EpisodesObjective(w_doc=0.0, w_rl=1.0)
WIDE = GrpoSpec(clip_low=1.0, clip_high=1e6)


def trainer_of(
    twin: Twin, objective: EpisodesObjective = RL, last_state: Path | None = None, **train: Any
) -> CartridgeTrainer:
    spec = TrainSpec(**{"steps": 5, "lr": 0.02, "row_tokens": 24, "clip": 1e9, **train})
    trainer = CartridgeTrainer(twin.model, bank_of(twin), spec, last_state, objective=objective)
    if last_state is None or not last_state.exists():
        trainer.begin("all", 5)
    return trainer


def exact(twin: Twin, batch: TrainBatch) -> TrainBatch:
    """With the sampler's record as the trainer itself computes it."""
    own = response_logprobs(
        twin.model, [r.sample for r in batch.rl], prefixes(bank_of(twin)), 64
    ).split([len(r.trained) for r in batch.rl])
    rl = [
        replace(r, sample=replace(r.sample, sampler_logprobs=tuple(p.tolist())))
        for r, p in zip(batch.rl, own, strict=True)
    ]
    return replace(batch, rl=rl)


def lesson(twin: Twin) -> TrainBatch:
    return exact(twin, scene(twin, bank_of(twin)))


# -- division ---------------------------------------------------------------------------------


def whole(twin: Twin) -> TrainBatch:
    """Also with an episode that the document teacher scored, and a further channel's data."""
    batch = lesson(twin)
    episode = batch.rl[4]
    teacher = batch.scores["doc_teacher"]
    marked = sum(episode.trained)
    more = teacher.rows(torch.arange(marked) % teacher.tokens)
    both = replace(teacher, logits=torch.cat([teacher.logits, more.logits]))
    marks = [(True,) * len(s.response_ids) for s in batch.doc]
    return replace(
        scored(batch, doc_teacher=both, old=torch.arange(32.0)),
        doc=[*batch.doc, episode.sample],
        doc_trained=[*marks, episode.trained],
        extra={"demonstrations": [f"x{i}" for i in range(5)]},
    )


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_everything_is_in_one_minibatch_with_what_it_belongs_to(llama: Twin, parts: int) -> None:
    batch = whole(llama)
    found = divide(batch, parts, random.Random)
    assert len(found) == parts

    def rows(one: TrainBatch) -> dict[str, Tensor]:
        """What is scored, by the name of the sample."""
        named = {}
        doc = one.scores["doc_teacher"].logits.split([sum(m) for m in one.doc_marks])
        named |= {f"doc {s.id}": x for s, x in zip(one.doc, doc, strict=True)}
        old = one.scores["old"].split([len(r.trained) for r in one.rl])
        named |= {f"old {r.sample.id}": x for r, x in zip(one.rl, old, strict=True)}
        turns = one.scores["sdpo_teacher"].logits.split([t.tokens for t in one.turns])
        named |= {f"turn {t.sample} {t.start}": x for t, x in zip(one.turns, turns, strict=True)}
        return named | {f"pair {p.id}": torch.zeros(0) for p in one.pairs}

    expected, came = rows(batch), [rows(part) for part in found]
    assert sorted(name for part in came for name in part) == sorted(expected)
    for part in came:
        for name, x in part.items():
            assert torch.equal(x, expected[name]), name
    for part in found:
        own = {r.sample.id for r in part.rl}
        assert {t.sample for t in part.turns} <= own
        assert ("e4" in own) == ("e4" in {s.id for s in part.doc})
        assert [r.sample.id for r in part.rl] == sorted(own)  # in the batch's order
    groups = [{r.group for r in part.rl} for part in found]
    assert sorted(g for some in groups for g in some) == ["x", "y"]
    data = [x for part in found for x in part.extra["demonstrations"]]
    assert sorted(data) == [f"x{i}" for i in range(5)]


def test_a_division_is_decided_by_its_generator(llama: Twin) -> None:
    batch = whole(llama)

    def drawn(name: str) -> list[list[str]]:
        return [
            [r.sample.id for r in part.rl] + list(part.extra["demonstrations"])
            for part in divide(batch, 3, lambda cartridge: random.Random(name + cartridge))
        ]

    assert drawn("a") == drawn("a")
    assert len({str(drawn(name)) for name in "abcdefgh"}) > 1
    assert divide(batch, 1, random.Random) == [batch]


def test_a_cartridge_s_data_is_divided_as_it_is_alone(llama: Twin) -> None:
    batch = whole(llama)
    batch = replace(batch, extra={})
    for name in "ab":
        together = divide(batch, 2, lambda cartridge: random.Random("draws"))
        alone = divide(of_cartridge(batch, name), 2, lambda cartridge: random.Random("draws"))
        for both, own in zip(together, alone, strict=True):
            of = of_cartridge(both, name)
            assert [s.id for s in of.doc] == [s.id for s in own.doc]
            assert [r.sample.id for r in of.rl] == [r.sample.id for r in own.rl]
            assert [p.id for p in of.pairs] == [p.id for p in own.pairs]


def test_results_join_by_their_denominators() -> None:
    """Two passes over two minibatches of 30 and 10 tokens, then 20 and 20."""
    outputs = [
        TrainStepOutput(
            0.0, 4, grad_norm=norm, lr=0.1, tokens=n,
            terms={"grpo": {"value": v, "count": n, "weight": 0.5, "ratio": r, "excluded": x}},
        )
        for norm, n, v, r, x in [
            (1.0, 30, 1.0, 1.0, 1), (2.0, 10, 2.0, 1.2, 2), (3.0, 20, 3.0, 0.9, 0),
            (4.0, 20, 4.0, 1.1, 3),
        ]
    ]  # fmt: skip
    found = joined_output(outputs, 2)
    assert (found.version, found.tokens, found.grad_norm, found.lr) == (4, 40, 2.5, 0.1)
    assert found.terms["grpo"] == pytest.approx(
        {
            "value": (30 + 20 + 60 + 80) / 80, "count": 40, "weight": 0.5,
            "ratio": (30 + 12 + 18 + 22) / 80, "ratio_last": 1.1, "excluded": 3, "updates": 4,
        }
    )  # fmt: skip


@pytest.mark.parametrize("baseline", ["grpo", "reinforce_pp"])
def test_minibatches_hold_the_terms_of_the_whole(llama: Twin, baseline: str) -> None:
    """Nearly without a learning rate: every value is the undivided step's, also where rewards are
    compared over the whole rollout."""
    batch = lesson(llama)
    form = changed(ALL, balance="none", grpo=GrpoSpec(baseline=baseline, zero_variance="keep"))
    one = trainer_of(llama, form, lr=1e-12).step(batch, 0)
    two = trainer_of(llama, form, lr=1e-12, minibatches=2, updates_per_rollout=3).step(batch, 0)
    assert one.terms["grpo"]["value"] != 0
    for name, term in one.terms.items():
        for fact, value in term.items():
            assert two.terms[name][fact] == pytest.approx(value, rel=2e-4, abs=2e-5), (name, fact)
        assert two.terms[name]["updates"] == 6
    assert two.tokens == one.tokens
    assert two.kl == pytest.approx(one.kl, rel=1e-4)


# -- the ratio --------------------------------------------------------------------------------


def by_hand(twin: Twin, batch: TrainBatch, updates: int, low: float, high: float) -> Tensor:
    """The clipped updates through plain transformers, an episode at a time, with Adam."""
    bank = bank_of(twin)
    trainable = trained(bank).requires_grad_()
    adam = torch.optim.Adam([trainable], lr=0.02)
    rl = [r for r in batch.rl if r.reward is not None]
    advantages = group_advantages([r.reward for r in rl], [r.group for r in rl])
    old: list[Tensor] = []
    for _ in range(updates):
        kv = dict(zip(bank.names, whole_kv(bank, trainable), strict=True))
        totals, tokens = torch.zeros(2), torch.zeros(2)
        for i, (r, a) in enumerate(zip(rl, advantages, strict=True)):
            assert a is not None
            s = r.sample
            log_p = twin.response_logits(s, kv[s.cartridge]).log_softmax(-1)
            pi = log_p.gather(-1, torch.tensor(s.response_ids)[:, None])[:, 0]
            pi = pi[torch.tensor(r.trained)]
            if len(old) <= i:
                old.append(pi.detach())
            ratio = (pi - old[i]).exp()
            gain = torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a).sum()
            c = bank.names.index(s.cartridge)
            totals = totals.index_add(0, torch.tensor([c]), -gain[None])
            tokens[c] += len(pi)
        adam.zero_grad()
        (totals / tokens).sum().backward()  # type: ignore[no-untyped-call]
        adam.step()
    return trainable.detach()


def lr_of(trainer: CartridgeTrainer) -> float:
    return trainer._state.progress["a"].lr


@pytest.mark.parametrize("old", ["trainer", "sampler"])
def test_four_updates_are_those_of_plain_transformers(llama: Twin, old: str) -> None:
    batch = lesson(llama)
    spec = GrpoSpec(old=old, mismatch=None, clip_low=0.05, clip_high=0.05)
    trainer = trainer_of(llama, changed(RL, grpo=spec), updates_per_rollout=4)
    assert lr_of(trainer) == 0.02
    found = trainer.step(batch, 0)
    expected = by_hand(llama, batch, 4, 0.05, 0.05)
    start = trained(bank_of(llama))
    moved = (expected - start).abs().mean().item()
    assert (trained(trainer.bank) - expected).abs().mean().item() < 0.02 * moved
    assert found.terms["grpo"]["clipped"] > 0
    without = by_hand(llama, batch, 4, 1.0, 1e6)
    assert (without - expected).abs().mean().item() > 0.1 * moved


def test_clipping_binds_where_there_are_several_updates(llama: Twin) -> None:
    batch = lesson(llama)
    one = trainer_of(llama).step(batch, 0).terms["grpo"]
    assert (one["ratio"], one["approx_kl"], one["clipped"]) == (1.0, 0.0, 0.0)
    assert "updates" not in one
    clipped, free = (
        trainer_of(llama, changed(RL, grpo=spec), updates_per_rollout=4)
        for spec in (GrpoSpec(), WIDE)
    )
    four, wide = (t.step(batch, 0).terms["grpo"] for t in (clipped, free))
    assert four["updates"] == 4
    assert four["ratio_last"] != pytest.approx(1.0, abs=1e-3)
    assert four["clipped"] == pytest.approx(four["clipped_low"] + four["clipped_high"])
    assert 0 < four["clipped"] < four["clipped_low_last"] + four["clipped_high_last"]
    assert 0 < four["approx_kl"] < four["approx_kl_last"]
    assert wide["clipped"] == 0
    assert not torch.allclose(trained(clipped.bank), trained(free.bank), atol=1e-4)


@pytest.mark.parametrize("change", [{"dual_clip": 1.05}, {"ratio": "sequence"}])
def test_dual_clip_and_the_sequence_s_ratio_have_an_effect(
    llama: Twin, change: dict[str, Any]
) -> None:
    """Where the sampler was a tenth of a nat less sure, ratios begin at 1.105."""
    batch = with_sampler(lesson(llama), 0.1)
    plain, other = (
        trainer_of(llama, changed(RL, grpo=GrpoSpec(old="sampler", mismatch=None, **more)),
                   updates_per_rollout=4)
        for more in ({}, change)
    )  # fmt: skip
    for trainer in (plain, other):
        trainer.step(batch, 0)
    assert not torch.allclose(trained(plain.bank), trained(other.bank), atol=1e-4)


def test_an_exact_sampler_s_record_is_the_plain_policy_gradient(llama: Twin) -> None:
    batch = lesson(llama)
    recorded = GrpoSpec(old="sampler", mismatch=None)
    ours, theirs = trainer_of(llama, changed(RL, grpo=recorded)), trainer_of(llama)
    found = ours.step(batch, 0).terms["grpo"]
    theirs.step(batch, 0)
    assert found["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert "mismatch_weight" not in found
    torch.testing.assert_close(trained(ours.bank), trained(theirs.bank), rtol=0, atol=2e-3)
    # A tenth of a nat lower on every token: the ratio is exp(.1), not a weight beside it.
    off = trainer_of(llama, changed(RL, grpo=recorded)).step(with_sampler(batch, 0.1), 0)
    assert off.terms["grpo"]["ratio"] == pytest.approx(1.1051709, abs=1e-4)


def test_the_sampled_hints_get_the_policy_before_the_updates(llama: Twin) -> None:
    objective = changed(ALL, w_doc=0.0, w_rl=0.0, beta=0.0, sdpo=SdpoSpec(variant="sampled"))
    found = trainer_of(llama, objective, updates_per_rollout=3).step(lesson(llama), 0)
    assert found.terms["sdpo"]["ratio_last"] != pytest.approx(1.0, abs=1e-3)


def test_the_trainer_s_own_numbers_depend_on_no_division(llama: Twin) -> None:
    batch, bank = lesson(llama), bank_of(llama)
    samples = [r.sample for r in batch.rl]
    expected = response_logprobs(llama.model, samples, prefixes(bank), 64)
    for micro in (None, 1, 17):
        found = shared_logprobs(
            llama.model, samples, prefixes(bank), row_tokens=24, micro_tokens=micro
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=NEAR)
    assert shared_logprobs(llama.model, [], prefixes(bank), row_tokens=24).shape == (0,)


def test_another_version_s_episodes_are_not_given_this_one_s_ratio(llama: Twin) -> None:
    batch = scene(llama, bank_of(llama), version=4)
    trainer = trainer_of(llama, updates_per_rollout=2, staleness=4)
    for _ in range(4):
        trainer.step(TrainBatch(), trainer.version)
    trainer.step(batch, 4)
    with pytest.raises(StaleTokenError, match=r"e0 was sampled by versions \[4\], and version 5"):
        trainer.step(batch, 5)


# -- what a step leaves -----------------------------------------------------------------------


def test_an_update_that_fails_takes_those_before_it_back(llama: Twin) -> None:
    """Of two minibatches one has a pair that is no number."""
    batch = lesson(llama)
    spoilt = replace(
        batch, pairs=[batch.pairs[0], replace(batch.pairs[1], ref_chosen=float("nan"))]
    )
    struck, calm = (trainer_of(llama, ALL, updates_per_rollout=2, minibatches=2) for _ in range(2))
    struck.step(batch, 0)
    before = trained(struck.bank)
    later = exact(llama, scene(llama, bank_of(llama), 1, version=1))
    with pytest.raises(RunError, match="replay_dpo became nan"):
        struck.step(replace(later, pairs=[replace(p, ref_version=1) for p in spoilt.pairs]), 1)
    assert torch.equal(trained(struck.bank), before)
    calm.step(batch, 0)
    assert struck.step(later, 1) == calm.step(later, 1)
    assert torch.equal(trained(struck.bank), trained(calm.bank))


def test_a_lost_reply_a_death_and_a_checkpoint_change_nothing(llama: Twin, tmp_path: Path) -> None:
    options = {"updates_per_rollout": 2, "minibatches": 2}
    batches = [lesson(llama), exact(llama, scene(llama, bank_of(llama), 1, version=1))]
    calm = trainer_of(llama, ALL, tmp_path / "calm", **options)
    done = [calm.step(batch, v) for v, batch in enumerate(batches)]
    first = trainer_of(llama, ALL, tmp_path / "struck", **options)
    assert first.step(batches[0], 0) == done[0]
    assert first.step(batches[0], 0) == done[0]  # the reply was lost
    path = first.save(tmp_path, {}, 1)
    second = trainer_of(llama, ALL, tmp_path / "struck", **options)
    assert second.recover() == 1
    third = trainer_of(llama, ALL, **options)
    third.restore(read_checkpoint(path))
    for trainer in (second, third):
        assert trainer.step(batches[0], 0) == done[0]
        assert trainer.step(batches[1], 1) == done[1]
        assert torch.equal(trained(trainer.bank), trained(calm.bank))


def test_more_minibatches_than_groups_train_what_there_is(llama: Twin) -> None:
    batch = lesson(llama)
    found = trainer_of(llama, minibatches=5).step(batch, 0)
    assert found.terms["grpo"]["count"] == 22
    empty = trainer_of(llama, minibatches=5).step(TrainBatch(), 0)
    assert empty.terms["grpo"]["value"] == 0.0


def test_samples_outside_episodes_are_dealt_too(llama: Twin) -> None:
    draws = random.Random(3)
    doc = [Sample(f"d{i}", "a", ids(draws, 3), ids(draws, 2), (), (0, 0)) for i in range(9)]
    sizes = [len(part.doc) for part in divide(TrainBatch(doc=doc), 4, random.Random)]
    assert sorted(sizes) == [2, 2, 2, 3]
