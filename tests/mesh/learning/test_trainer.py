"""Test the trainer against independent computations, channel by channel."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from channel_setup import ALL, bank_of, changed, prefixes, scene, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.learning.trainer_setup import Killed, copied, killed, same, trainer_of

from cartridge_forge.learning.cartridge import first_tokens
from cartridge_forge.learning.checkpoint import read_checkpoint
from cartridge_forge.learning.losses.channel import active_channels
from cartridge_forge.learning.losses.doc_kl import doc_batch
from cartridge_forge.learning.step import train_step
from cartridge_forge.learning.teacher import TeacherDistribution, score
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective
from cartridge_forge.plugins.objectives.policy_scores import with_references
from cartridge_forge.plugins.watch.score_text import TOP, decoded, decoded_top
from cartridge_forge.protocols.spec.sections import LossSpec, TrainSpec
from cartridge_forge.protocols.step import TrainBatch, completions

if TYPE_CHECKING:
    from collections.abc import Callable

    from twins import Twin

    from cartridge_forge.protocols.step import Sample, TrainStepOutput

    MakeSamples = Callable[..., list[Sample]]

TRAIN = TrainSpec(steps=5, lr=0.02, row_tokens=24)
WARMING = changed(ALL, alpha=0.4, alpha_warmup_steps=2, micro_tokens=40, compare_every=1)


MARKS = [[True, False, True, True, False], [True, True, False]]


def channel_trainer_of(
    twin: Twin, objective: EpisodesObjective = WARMING, last_state: Path | None = None
) -> CartridgeTrainer:
    bank = first_tokens({n: twin.kv[n] for n in "ab"}, 8, 1)
    return CartridgeTrainer(twin.model, bank, TRAIN, last_state, objective=objective)


def test_alpha_warms_up_with_the_arm_s_steps(llama: Twin) -> None:
    trainer = channel_trainer_of(llama)
    trainer.begin("all", 5)
    alphas = []
    for _ in range(4):
        v = trainer.version
        result = trainer.step(scene(llama, trainer.bank, v, version=v), v)
        alphas.append(result.terms.get("sdpo", {"weight": 0.0})["weight"])
    assert alphas == pytest.approx([0.0, 0.2, 0.4, 0.4])
    trainer.begin("again", 5)
    v = trainer.version
    assert "sdpo" not in trainer.step(scene(llama, trainer.bank, v, version=v), v).terms


def test_a_replaced_trainer_answers_what_was_done_with_every_term(
    llama: Twin, tmp_path: Path
) -> None:
    first = channel_trainer_of(llama, last_state=tmp_path / "state")
    first.begin("all", 3)
    batches = []
    for _ in range(2):
        v = first.version
        batches.append(scene(llama, first.bank, v, version=v))
        done = first.step(batches[-1], v)
    assert done.terms.keys() == {"doc_kl", "grpo", "sdpo", "replay_dpo"}
    assert len(done.cosines) == 6
    second = channel_trainer_of(llama, last_state=tmp_path / "state")
    assert second.recover() == first.version == 2
    assert second.step(batches[-1], 1) == done
    assert torch.equal(trained(second.bank), trained(first.bank))


@pytest.mark.parametrize("every", [1, 2])
def test_a_resumed_trainer_balances_to_the_bit(llama: Twin, tmp_path: Path, every: int) -> None:
    """The running norms are in the checkpoint: two steps, a resume and two more are four steps."""
    objective = changed(WARMING, balance_every=every, compare_every=0)
    whole = channel_trainer_of(llama, objective)
    whole.begin("all", 4)
    batches = []
    for v in range(4):
        if v == 2:
            saved = whole.save(tmp_path, {}, 2)
        batches.append(scene(llama, whole.bank, v, version=v))
        last = whole.step(batches[-1], v)
    resumed = channel_trainer_of(llama, objective)
    resumed.restore(read_checkpoint(saved))
    for v in (2, 3):
        again = resumed.step(batches[v], v)
    assert again == last
    assert torch.equal(trained(resumed.bank), trained(whole.bank))
    # Its mean is of several steps; "sdpo" warms up and has one step fewer.
    assert last.terms["grpo"]["mean_grad_norm"] != last.terms["grpo"].get("grad_norm")
    assert ("share" in last.terms["grpo"]) == (every == 1)


def test_a_checkpoint_without_running_norms_begins_them(llama: Twin, tmp_path: Path) -> None:
    old = channel_trainer_of(llama, changed(WARMING, balance="none"))
    old.begin("all", 4)
    old.step(scene(llama, old.bank, 0, version=0), 0)
    checkpoint = read_checkpoint(old.save(tmp_path, {}, 1))
    assert "balance" not in checkpoint.facts["cartridges"]["a"]
    new = channel_trainer_of(llama)
    new.restore(checkpoint)
    term = new.step(scene(llama, new.bank, 1, version=1), 1).terms["grpo"]
    assert term["mean_grad_norm"] == pytest.approx(term["grad_norm"])


def test_an_arm_begins_without_the_norms_of_the_arm_before(llama: Twin) -> None:
    trainer = channel_trainer_of(llama)
    for arm in ("all", "again"):
        trainer.begin(arm, 4)
        v = trainer.version
        term = trainer.step(scene(llama, trainer.bank, v, version=v), v).terms["grpo"]
        assert term["mean_grad_norm"] == pytest.approx(term["grad_norm"])


def test_one_channel_is_trained_as_its_weight_says_to_the_bit(llama: Twin) -> None:
    """No norm is measured, and no key is added to the row."""
    results = []
    for balance in ("none", "gradient_norm"):
        alone = changed(WARMING, w_doc=0.0, alpha=0.0, beta=0.0, compare_every=0, balance=balance)
        trainer = channel_trainer_of(llama, alone)
        trainer.begin("grpo", 2)
        done = trainer.step(scene(llama, trainer.bank), 0)
        results.append((done, trained(trainer.bank)))
    (plain, first), (balanced, second) = results
    assert plain == balanced
    assert "coefficient" not in balanced.terms["grpo"]
    assert torch.equal(first, second)


def test_references_are_of_the_untrained_cartridges(llama: Twin, tmp_path: Path) -> None:
    """Whatever has been trained since, in either arm and after a resume, to the bit."""
    trainer = channel_trainer_of(llama)
    bank = bank_of(llama)
    trainer.begin("all", 4)
    lacking = [replace(p, ref_version=-1) for p in scene(llama, bank).pairs]
    expected = with_references(llama.model, lacking, prefixes(bank), TRAIN.row_tokens, 0, 0)
    for v in range(2):
        trainer.step(scene(llama, trainer.bank, v, version=v), v)
        assert trainer.references(lacking) == expected
    assert not torch.equal(trained(trainer.bank), trained(bank))
    (one,) = trainer.references(lacking[:1])
    sample = completions(lacking[:1])[0]
    logs = llama.response_logits(sample, prefixes(bank)[sample.cartridge]).log_softmax(-1)
    by_hand = sum(logs[t, token].item() for t, token in enumerate(sample.response_ids))
    assert one.ref_chosen == pytest.approx(by_hand, rel=1e-5)

    checkpoint = read_checkpoint(trainer.save(tmp_path, {}, 2))
    resumed = channel_trainer_of(llama)
    resumed.restore(checkpoint)
    assert resumed.references(lacking) == expected
    trainer.begin("again", 4)
    again = [replace(p, ref_version=3) for p in expected]
    assert trainer.references(lacking) == again


def test_documents_alone_are_the_step_of_samples_and_teacher(
    llama: Twin, make_samples: MakeSamples
) -> None:
    ours, theirs = (channel_trainer_of(llama, EpisodesObjective()) for _ in range(2))
    samples = make_samples(("a", 4, 5), ("b", 2, 3))
    teacher = TeacherDistribution(logits=score(llama.model, samples, llama.cached(), 64))
    for trainer in (ours, theirs):
        trainer.begin("on_policy", 2)
    done = ours.step(doc_batch(samples, teacher), 0)
    assert done == theirs.step(TrainBatch(doc=samples, scores={"doc_teacher": teacher}), 0)
    assert done.terms["doc_kl"]["value"] == done.kl > 0
    assert torch.equal(trained(ours.bank), trained(theirs.bank))


def test_what_bounds_memory_and_the_form_of_doc_kl_reach_the_step(
    llama: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def step(*given: Any) -> Any:
        asked.append({"channels": given[4], **vars(given[6])})
        return train_step(*given)

    monkeypatch.setattr("cartridge_forge.learning.trainer.train_step", step)
    spec = TrainSpec(steps=1, row_tokens=24, logit_chunk_mb=3, recompute_layers=True)
    loss = LossSpec(direction="reverse")
    bank = first_tokens({n: llama.kv[n] for n in "ab"}, 8, 1)
    trainer = CartridgeTrainer(llama.model, bank, spec, objective=WARMING, loss=loss)
    trainer.begin("all", 1)
    trainer.step(scene(llama, bank), 0)
    (given,) = asked
    assert (given["logit_bytes"], given["recompute_layers"]) == (3 * 2**20, True)
    assert (given["micro_tokens"], given["compare_gradients"]) == (40, True)
    assert given["channels"] == [c for c in active_channels(WARMING, loss) if c.at(0).weight]
    assert given["channels"][0].spec is loss


def scores_of(twin: Twin, updates: int) -> tuple[dict[str, list[float | None]], TrainStepOutput]:
    """The scores of a step in several micro-batches that trains 5 of 8 document tokens."""
    bank = first_tokens({n: twin.kv[n] for n in "ab"}, 8, 1)
    train = TRAIN.model_copy(update={"updates_per_rollout": updates})
    trainer = CartridgeTrainer(
        twin.model, bank, train, objective=changed(ALL, micro_tokens=8), keep_token_scores=True
    )
    trainer.begin("all", 5)
    given = scene(twin, trainer.bank, 0)
    rows = torch.tensor([m for own in MARKS for m in own]).nonzero().flatten()
    teacher = given.scores["doc_teacher"].rows(rows)
    batch = replace(
        given,
        doc_trained=[tuple(own) for own in MARKS],
        scores={**given.scores, "doc_teacher": teacher},
    )
    result = trainer.step(batch, 0)
    return {id: decoded(of["kl"]) for id, of in trainer.token_scores.items()}, result


def test_the_tokens_scores_add_up_to_the_step_s_kl(llama: Twin) -> None:
    scores, result = scores_of(llama, 1)
    assert [[value is not None for value in scores[id]] for id in ("d0", "d1")] == MARKS
    told = sum(value for of in scores.values() for value in of if value is not None)
    assert told > 0.01
    assert told / 5 == pytest.approx(result.kl, rel=0.031)
    assert scores_of(llama, 2)[0] == scores  # of the first of two updates


def test_the_teacher_s_likeliest_tokens_are_kept_in_order(llama: Twin) -> None:
    bank = first_tokens({n: llama.kv[n] for n in "ab"}, 8, 1)
    trainer = CartridgeTrainer(llama.model, bank, TRAIN, objective=ALL, keep_token_scores=True)
    trainer.begin("all", 5)
    batch = scene(llama, trainer.bank, 0)
    trainer.step(batch, 0)
    logits = batch.scores["doc_teacher"].logits
    assert logits is not None
    probabilities, tokens = logits.double().softmax(-1).topk(TOP)
    found = []
    for sample in batch.doc:
        of = trainer.token_scores[sample.id]
        found += [likely for likely in decoded_top(of["top"], decoded(of["kl"])) if likely]
    assert [[token for token, _ in likely] for likely in found] == tokens.tolist()
    for likely, expected in zip(found, probabilities.tolist(), strict=True):
        assert [p for _, p in likely] == pytest.approx([math.log(p) for p in expected], rel=0.031)


def test_the_tokens_scores_are_kept_where_they_are_asked_for(llama: Twin) -> None:
    trainer = channel_trainer_of(llama)
    trainer.begin("all", 5)
    trainer.step(scene(llama, trainer.bank, 0), 0)
    assert trainer.token_scores == {}


if TYPE_CHECKING:
    from collections.abc import Callable

    from twins import Twin

    from cartridge_forge.protocols.step import Sample

    MakeSamples = Callable[..., list[Sample]]


def batch(
    twin: Twin, make_samples: MakeSamples, version: int
) -> tuple[list[Sample], TeacherDistribution]:
    """Samples and scores that depend on the version alone."""
    shapes = [("a", 4, 5), ("b", 2, 3), ("a", 3, 2)]
    if version in (1, 4):  # steps that do not train b
        del shapes[1]
    samples = make_samples(*shapes, seed=version, version=version)
    return samples, TeacherDistribution(logits=score(twin.model, samples, twin.cached(), 64))


def outcomes(trainer: CartridgeTrainer, twin: Twin, make_samples: MakeSamples, call: str) -> object:
    """One call of the controller: what it answers."""
    kind, _, version = call.partition(" ")
    if kind == "step":
        return trainer.step(doc_batch(*batch(twin, make_samples, int(version))), int(version))
    if kind == "publish":
        snapshot = trainer.snapshot(int(version))
        return snapshot.since, {name: kv.tolist() for name, kv in snapshot.kv.items()}
    return trainer.begin(kind, 2)


# Two arms of two steps each, published where the controller publishes.
CALLS = [
    "on_policy", "publish 0", "step 0", "publish 1", "step 1", "publish 2",
    "offline", "step 3", "step 4", "publish 5",
]  # fmt: skip

KILLS = ("", "before it began", "before its state was kept", "before it told")


@pytest.fixture(scope="module")
def undisturbed(llama: Twin, make_samples: MakeSamples) -> tuple[list[object], dict]:
    trainer = trainer_of(llama)
    answers = [outcomes(trainer, llama, make_samples, call) for call in CALLS]
    return answers, copied(trainer)


@settings(max_examples=15, deadline=None)
@given(kills=st.lists(st.sampled_from(KILLS), min_size=len(CALLS), max_size=len(CALLS)))
def test_killed_anywhere_and_replaced_it_goes_on_bit_for_bit(
    llama: Twin,
    make_samples: MakeSamples,
    undisturbed: tuple[list[object], dict],
    kills: list[str],
) -> None:
    expected, end = undisturbed
    with tempfile.TemporaryDirectory() as directory:
        last_state = Path(directory) / "last-state"
        trainer = trainer_of(llama, last_state=last_state)
        for call, kill, answer in zip(CALLS, kills, expected, strict=True):
            if kill:
                if kill == "before its state was kept":
                    trainer._keep = killed
                if kill != "before it began":
                    try:
                        outcomes(trainer, llama, make_samples, call)
                    except Killed:
                        assert kill == "before its state was kept"
                trainer = trainer_of(llama, last_state=last_state)
                trainer.recover()
            assert outcomes(trainer, llama, make_samples, call) == answer
        same(copied(trainer), end)
        assert trainer.version == 5
