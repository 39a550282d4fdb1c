"""The trainer: versions that are never reused, and a resumed run that equals the uninterrupted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from channel_setup import prefixes, trained
from rooms.learning.trainer_setup import CONFIG, copied, parts, same, trainer_of

from cartridge_forge.learning.cartridge import first_tokens
from cartridge_forge.learning.checkpoint import Checkpoint, list_checkpoints, read_checkpoint
from cartridge_forge.learning.decoder import BACKWARD
from cartridge_forge.learning.losses.doc_kl import doc_batch
from cartridge_forge.learning.model.loading import base_hash, load_model
from cartridge_forge.learning.teacher import TeacherDistribution, score
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.protocols.errors import CheckpointError, PublishError, StaleTokenError
from cartridge_forge.protocols.spec.sections import LossSpec, WarmStartSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from twins import Twin

    from cartridge_forge.protocols.step import Sample, TrainStepOutput

    MakeSamples = Callable[..., list[Sample]]


def batch(
    twin: Twin, make_samples: MakeSamples, version: int
) -> tuple[list[Sample], TeacherDistribution]:
    """Samples and scores that depend on the version alone."""
    samples = make_samples(("a", 4, 5), ("b", 2, 3), ("a", 3, 2), seed=version, version=version)
    return samples, TeacherDistribution(logits=score(twin.model, samples, twin.cached(), 64))


def advance(
    trainer: CartridgeTrainer, twin: Twin, make_samples: MakeSamples, steps: int
) -> list[TrainStepOutput]:
    results = []
    for _ in range(steps):
        v = trainer.version
        results.append(trainer.step(doc_batch(*batch(twin, make_samples, v)), v))
    return results


def test_a_resumed_arm_equals_the_uninterrupted_one_bit_for_bit(
    llama: Twin, make_samples: MakeSamples, tmp_path: Path
) -> None:
    whole = trainer_of(llama)
    whole.begin("on_policy", 2)
    advance(whole, llama, make_samples, 2)  # an earlier arm: versions and steps differ
    whole.begin("offline", 6)
    expected = advance(whole, llama, make_samples, 6)

    killed = trainer_of(llama)
    killed.begin("on_policy", 2)
    advance(killed, llama, make_samples, 2)
    killed.begin("offline", 6)
    advance(killed, llama, make_samples, 3)
    position = {"arm": "on_policy", "step": 3, "order": [2, 0, 1]}
    path = killed.save(tmp_path, position, 6)
    assert path == tmp_path / "version-000006"

    resumed = trainer_of(llama)
    assert resumed.restore(read_checkpoint(path)) == position
    assert resumed.version == 6
    assert advance(resumed, llama, make_samples, 3) == expected[3:]  # kl, norm, rate: all equal
    assert resumed.version == whole.version == 9
    assert parts(resumed).keys() == {
        f"{cartridge}/{name}"
        for cartridge in "ab"
        for name in ("trainable", "frozen", "adam.step", "adam.exp_avg", "adam.exp_avg_sq")
    }
    for name, tensor in parts(whole).items():
        assert torch.equal(parts(resumed)[name], tensor), name


def test_a_checkpoint_before_the_first_step(
    llama: Twin, make_samples: MakeSamples, tmp_path: Path
) -> None:
    """No moments yet; and an arm whose warm-up is shorter than the config's."""
    whole = trainer_of(llama)
    whole.begin("on_policy", 2)
    path = whole.save(tmp_path, {}, 0)
    resumed = trainer_of(llama)
    resumed.restore(read_checkpoint(path))
    assert advance(resumed, llama, make_samples, 2) == advance(whole, llama, make_samples, 2)
    same(parts(resumed), parts(whole))


@pytest.mark.parametrize("stored", ["mkl", "onednn", None])
def test_what_multiplies_gradients_is_kept_on_another_processor(
    stored: str | None, llama: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older checkpoints name none, and were made by oneDNN."""
    monkeypatch.setitem(BACKWARD, "float32", stored or "mkl")
    checkpoint = saved(trainer_of(llama), tmp_path)
    if stored is None:
        del checkpoint.facts["backward"]
    monkeypatch.setitem(BACKWARD, "float32", "onednn" if stored == "mkl" else "mkl")
    trainer_of(llama).restore(checkpoint)
    assert BACKWARD["float32"] == (stored or "onednn")


def test_the_whole_bank_comes_from_the_checkpoint(llama: Twin, tmp_path: Path) -> None:
    """Document KV read again elsewhere may differ in its last bits; the cartridges must not."""
    first = trainer_of(llama)
    checkpoint = saved(first, tmp_path)
    bank = first_tokens({n: llama.kv[n] * 1.001 for n in "ab"}, 6, 1)
    again = CartridgeTrainer(llama.model, bank, CONFIG)
    kv = prefixes(again.bank)
    again.restore(checkpoint)
    assert not torch.equal(kv["a"], prefixes(first.bank)["a"])
    same(prefixes(again.bank), prefixes(first.bank))


def test_training_on_after_a_save_does_not_reach_into_a_restored_twin(
    llama: Twin, make_samples: MakeSamples, tmp_path: Path
) -> None:
    first = trainer_of(llama)
    first.begin("on_policy", 9)
    advance(first, llama, make_samples, 1)
    saved = read_checkpoint(first.save(tmp_path, {}, 1))
    second = trainer_of(llama)
    second.restore(saved)
    before = {name: tensor.clone() for name, tensor in saved.cartridge("a").items()}
    advance(second, llama, make_samples, 1)
    same(dict(saved.cartridge("a")), before)


def test_rates_follow_the_arm_own_schedule(llama: Twin, make_samples: MakeSamples) -> None:
    trainer = trainer_of(llama)
    trainer.begin("on_policy", 4)
    # Two steps of warm-up, then the cosine from 1 to .1, at 0 and half-way.
    rates = [r.lr for r in advance(trainer, llama, make_samples, 4)]
    assert rates == pytest.approx([0.01, 0.02, 0.02, 0.011])
    trainer.begin("offline", 2)  # too short for two: warm-up takes half of an arm at most
    rates = [r.lr for r in advance(trainer, llama, make_samples, 2)]
    assert rates == pytest.approx([0.02, 0.02])


def test_the_warm_start_has_a_rate_and_a_loss_of_its_own(
    llama: Twin, make_samples: MakeSamples, tmp_path: Path
) -> None:
    """Two steps on the teacher's text are those of a trainer with that rate and loss, bit for bit;
    the step after them is that of a trainer of the other ones that goes on from there: with Adam's
    moments, on its own schedule."""
    jsd = LossSpec(direction="jsd", beta=0.5)
    warm = WarmStartSpec(steps=2, lr=CONFIG.lr / 4, loss=jsd)
    both = trainer_of(llama, config=CONFIG.model_copy(update={"warm_start": warm}))
    slow = trainer_of(llama, config=CONFIG.model_copy(update={"lr": CONFIG.lr / 4}), loss=jsd)
    own, _ = batch(llama, make_samples, 2)
    teachers = [replace(s, versions=(-1,) * len(s.versions)) for s in own]
    scores = TeacherDistribution(logits=score(llama.model, own, llama.cached(), 64))
    for trainer in (both, slow):
        trainer.begin("on_policy", 6)
    for _ in range(2):
        expected = slow.step(doc_batch(teachers, scores), slow.version)
        assert both.step(doc_batch(teachers, scores), both.version) == expected
    same(parts(both), parts(slow))
    after = trainer_of(llama)
    after.restore(read_checkpoint(slow.save(tmp_path, {}, slow.version)))
    expected = after.step(doc_batch(own, scores), after.version)
    assert both.step(doc_batch(own, scores), both.version) == expected
    assert expected.lr == pytest.approx(CONFIG.lr)  # the peak, after two steps of warm-up
    assert float(parts(both)["a/adam.step"]) == 3
    same(parts(both), parts(after))


def test_every_arm_starts_untrained_and_no_version_comes_twice(
    llama: Twin, make_samples: MakeSamples, tmp_path: Path
) -> None:
    trainer = trainer_of(llama)
    untrained = trained(trainer.bank)
    assert trainer.begin("on_policy", 3) == 0
    first = advance(trainer, llama, make_samples, 3)
    assert trainer.version == 3
    assert not torch.equal(trained(trainer.bank), untrained)
    assert trainer.begin("offline", 3) == 4
    assert torch.equal(trained(trainer.bank), untrained)
    assert parts(trainer).keys() == {"a/trainable", "a/frozen", "b/trainable", "b/frozen"}
    path = trainer.save(tmp_path, {}, 4)
    resumed = trainer_of(llama)
    resumed.restore(read_checkpoint(path))
    assert resumed.begin("another", 3) == 5
    assert first[0].lr == 0.02  # warm-up was one step of three


@pytest.mark.parametrize("version", [0, 3])
def test_a_step_on_another_version_is_refused(
    llama: Twin, make_samples: MakeSamples, version: int
) -> None:
    trainer = trainer_of(llama)
    trainer.begin("on_policy", 5)
    advance(trainer, llama, make_samples, 2)
    before = trained(trainer.bank)
    with pytest.raises(
        StaleTokenError,
        match=f"asked to train version {version}, and the trainer stands at 2: a step was lost",
    ):
        trainer.step(
            doc_batch(make_samples(("a", 4, 5), version=version), TeacherDistribution()), version
        )
    assert torch.equal(trained(trainer.bank), before)
    assert trainer.version == 2


def test_a_refused_batch_makes_no_version(llama: Twin, make_samples: MakeSamples) -> None:
    trainer = trainer_of(llama, config=CONFIG.model_copy(update={"staleness": 1}))
    trainer.begin("on_policy", 5)
    advance(trainer, llama, make_samples, 3)
    samples = make_samples(("a", 4, 5), version=1)
    teacher = TeacherDistribution(logits=score(llama.model, samples, llama.cached(), 64))
    with pytest.raises(StaleTokenError, match=r"train\.staleness 1"):
        trainer.step(doc_batch(samples, teacher), 3)
    assert trainer.version == 3
    fresh = [replace(s, versions=(2,) * 5) for s in samples]
    assert trainer.step(doc_batch(fresh, teacher), 3).stale_tokens == 5
    assert trainer.version == 4


def test_a_snapshot_keeps_what_it_was_published_with(
    llama: Twin, make_samples: MakeSamples
) -> None:
    trainer = trainer_of(llama)
    trainer.begin("on_policy", 5)
    kv = trainer.snapshot(0).kv
    assert list(kv) == ["a", "b"]
    assert torch.equal(kv["b"], llama.kv["b"][:, :, :, :6])
    before = kv["b"].clone()
    advance(trainer, llama, make_samples, 2)
    assert torch.equal(kv["b"], before)
    assert not torch.equal(trainer.snapshot(2).kv["b"], before)


def test_snapshots_are_published_in_the_asked_dtype(llama: Twin) -> None:
    trainer = trainer_of(llama, publish_dtype="bfloat16")
    trainer.begin("on_policy", 1)
    for name, kv in prefixes(trainer.bank).items():
        assert kv.dtype == torch.float32
        assert torch.equal(trainer.snapshot(0).kv[name], kv.bfloat16())


def test_the_newest_checkpoints_are_kept(
    llama: Twin, make_samples: MakeSamples, tmp_path: Path
) -> None:
    trainer = trainer_of(llama)
    trainer.begin("on_policy", 5)
    for version in (1, 2, 3, 4):
        advance(trainer, llama, make_samples, 1)
        trainer.save(tmp_path, {}, version)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["version-000003", "version-000004"]


@pytest.mark.parametrize("version", [0, 2])
def test_no_checkpoint_is_made_of_half_a_step(
    llama: Twin, make_samples: MakeSamples, tmp_path: Path, version: int
) -> None:
    """The trainer has stepped and the caller's position has not, or the other way."""
    trainer = trainer_of(llama)
    trainer.begin("on_policy", 5)
    advance(trainer, llama, make_samples, 1)
    with pytest.raises(
        CheckpointError, match=f"trainer stands at version 1 and the position at {version}: a step"
    ):
        trainer.save(tmp_path, {}, version)
    assert list_checkpoints(tmp_path) == []


def saved(trainer: CartridgeTrainer, directory: Path) -> Checkpoint:
    trainer.begin("on_policy", 5)
    return read_checkpoint(trainer.save(directory, {}, 0))


def test_a_checkpoint_of_another_base_model_is_refused(llama: Twin, tmp_path: Path) -> None:
    checkpoint = saved(trainer_of(llama), tmp_path)
    model = load_model(str(llama.path))
    model.lm_head.weight[0, 0] += 1
    other = CartridgeTrainer(model, first_tokens({n: llama.kv[n] for n in "ab"}, 6, 1), CONFIG)
    with pytest.raises(CheckpointError, match="made with other base weights; resume with the mod"):
        other.restore(checkpoint)


@pytest.mark.parametrize(
    ("names", "tokens", "frozen"),
    [
        ("ac", 6, 1),
        ("abc", 6, 1),
        ("ab", 7, 1),
        # As many trainable tokens, one frozen token more.
        ("ab", 7, 2),
    ],
)
def test_a_checkpoint_of_other_cartridges_is_refused(
    llama: Twin, tmp_path: Path, names: str, tokens: int, frozen: int
) -> None:
    checkpoint = saved(trainer_of(llama), tmp_path)
    other = trainer_of(llama, names, tokens=tokens, frozen=frozen)
    before = prefixes(other.bank)
    with pytest.raises(
        CheckpointError,
        match=r"holds cartridges \['a', 'b'\] of shapes .* resume with the spec of its run",
    ):
        other.restore(checkpoint)
    same(prefixes(other.bank), before)
    assert other.version == -1


def test_the_base_hash_is_that_of_the_weights_now(llama: Twin) -> None:
    assert trainer_of(llama).base_hash() == base_hash(llama.model)


def test_a_step_asked_again_answers_the_same_and_trains_nothing(
    llama: Twin, make_samples: MakeSamples
) -> None:
    trainer = trainer_of(llama)
    trainer.begin("on_policy", 5)
    first, second = advance(trainer, llama, make_samples, 2)
    assert first != second
    before = copied(trainer)
    # Whatever it is asked with: the answer is of what was trained.
    assert (
        trainer.step(doc_batch(make_samples(("b", 1, 1), version=1), TeacherDistribution()), 1)
        == second
    )
    assert trainer.version == 2
    same(copied(trainer), before)
    # The step before the last is past, and so are those of another arm.
    with pytest.raises(StaleTokenError, match="version 0, and the trainer stands at 2"):
        trainer.step(doc_batch(*batch(llama, make_samples, 0)), 0)
    trainer.begin("offline", 5)
    with pytest.raises(StaleTokenError, match="version 2, and the trainer stands at 3"):
        trainer.step(doc_batch(*batch(llama, make_samples, 2)), 2)


def test_the_start_of_an_arm_asked_again_makes_no_version(
    llama: Twin, make_samples: MakeSamples
) -> None:
    trainer = trainer_of(llama)
    assert [trainer.begin("on_policy", 5) for _ in range(3)] == [0, 0, 0]
    advance(trainer, llama, make_samples, 2)
    assert [trainer.begin("offline", 5) for _ in range(2)] == [3, 3]
    # An arm that has trained is started anew, as another version.
    advance(trainer, llama, make_samples, 1)
    assert trainer.begin("offline", 5) == 5


def test_without_a_last_state_nothing_was_trained(llama: Twin, tmp_path: Path) -> None:
    fresh = trainer_of(llama, last_state=tmp_path / "last-state")
    assert fresh.recover() == -1
    assert trainer_of(llama).recover() == -1, "without a place for it either"
    assert fresh.begin("on_policy", 3) == 0


def test_a_damaged_last_state_is_refused(
    llama: Twin, make_samples: MakeSamples, tmp_path: Path
) -> None:
    path = tmp_path / "last-state"
    trainer = trainer_of(llama, last_state=path)
    trainer.begin("on_policy", 3)
    advance(trainer, llama, make_samples, 1)
    file = min(path.glob("cartridge-*"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"the trainer's last state .* cannot be read"):
        trainer_of(llama, last_state=path).recover()


def test_a_restored_checkpoint_replaces_a_later_last_state(
    llama: Twin, make_samples: MakeSamples, tmp_path: Path
) -> None:
    """A run that is resumed goes back to its checkpoint: who dies then must not leap ahead."""
    path = tmp_path / "last-state"
    trainer = trainer_of(llama, last_state=path)
    trainer.begin("on_policy", 5)
    (first,) = advance(trainer, llama, make_samples, 1)
    checkpoint = read_checkpoint(trainer.save(tmp_path, {"step": 1}, 1))
    there = copied(trainer)
    advance(trainer, llama, make_samples, 2)

    resumed = trainer_of(llama, last_state=path)
    assert resumed.restore(checkpoint) == {"step": 1}
    successor = trainer_of(llama, last_state=path)
    assert successor.recover() == 1
    same(copied(successor), there)
    assert successor.step(doc_batch([], TeacherDistribution()), 0) == first, (
        "a checkpoint knows its last answer too"
    )


@pytest.mark.parametrize("staleness", [0, 2])
def test_as_many_snapshots_are_kept_as_the_bound_needs(
    llama: Twin, make_samples: MakeSamples, staleness: int
) -> None:
    trainer = trainer_of(llama, config=CONFIG.model_copy(update={"staleness": staleness}))
    trainer.begin("on_policy", 9)
    published = [trainer.snapshot(0).kv]
    for version in range(1, 5):
        advance(trainer, llama, make_samples, 1)
        published.append(trainer.snapshot(version).kv)
        oldest = max(0, version - staleness)
        for again in range(oldest, version + 1):
            same(dict(trainer.snapshot(again).kv), dict(published[again]))
        for gone in range(oldest):
            held = list(range(oldest, version + 1))
            message = (
                rf"version {gone} cannot be published: .* at {version} and still has \[{held[0]}"
            )
            with pytest.raises(PublishError, match=message):
                trainer.snapshot(gone)
    with pytest.raises(PublishError, match="version 5 cannot be published"):
        trainer.snapshot(5)


def test_a_version_that_was_never_published_is_not_kept(
    llama: Twin, make_samples: MakeSamples
) -> None:
    trainer = trainer_of(llama, config=CONFIG.model_copy(update={"staleness": 1}))
    trainer.begin("offline", 9)
    advance(trainer, llama, make_samples, 2)
    with pytest.raises(PublishError, match=r"version 1 cannot be published: .* has \[\]"):
        trainer.snapshot(1)


def test_a_rate_relative_to_the_root_mean_square_moves_each_tensor_by_its_share(
    twin: Twin, make_samples: MakeSamples
) -> None:
    """Adam's first update is the rate in every number with a gradient, whatever its size."""
    once = CONFIG.model_copy(update={"warmup_steps": 0, "lr_scale": "rms"})
    trainer = trainer_of(twin, "a", once)
    before = trainer.bank.trainable["a"].detach().clone()
    before_rms = before.pow(2).mean(dim=(2, 3, 4)).sqrt()
    trainer.begin("on_policy", 10)
    samples = make_samples(("a", 4, 5), seed=0, version=0)
    teacher = TeacherDistribution(logits=score(twin.model, samples, twin.cached(), 64))
    trainer.step(doc_batch(samples, teacher), 0)
    moved = (trainer.bank.trainable["a"].detach() - before).abs().amax(dim=(2, 3, 4))
    torch.testing.assert_close(moved, 0.02 * before_rms, rtol=1e-3, atol=0)
