"""The trainer: versions that are never reused, and a resumed run that equals the uninterrupted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from learning.checkpoint import Checkpoint, list_checkpoints, read_checkpoint
from learning.losses import Teacher
from learning.model import base_hash, load_model
from learning.scoring import score
from learning.trainer import CartridgeTrainer, TrainerConfig
from protocols.errors import CheckpointError, StaleTokenError

if TYPE_CHECKING:
    from collections.abc import Callable

    from learning.step import StepResult
    from protocols.types import Sample
    from tests.learning.conftest import Twin

    MakeSamples = Callable[..., list[Sample]]

CONFIG = TrainerConfig(tokens=6, frozen=1, lr=0.02, warmup_steps=2, clip=1.0, row_tokens=20)


def trainer_of(twin: Twin, names: str = "ab", config: TrainerConfig = CONFIG) -> CartridgeTrainer:
    return CartridgeTrainer(twin.model, {n: twin.kv[n] for n in names}, config)


def advance(
    trainer: CartridgeTrainer, twin: Twin, make_samples: MakeSamples, steps: int
) -> list[StepResult]:
    """Steps on batches that depend on the version alone."""
    results = []
    for _ in range(steps):
        v = trainer.version
        samples = make_samples(("a", 4, 5), ("b", 2, 3), ("a", 3, 2), seed=v, version=v)
        teacher = Teacher(logits=score(twin.model, samples, twin.cached(), 64))
        results.append(trainer.step(samples, teacher, v))
    return results


def parts(trainer: CartridgeTrainer) -> dict[str, torch.Tensor]:
    adam = trainer._optimizer.state[trainer.bank.trainable]
    return {"trainable": trainer.bank.trainable, "frozen": trainer.bank.frozen, **adam}


def test_a_resumed_arm_equals_the_uninterrupted_one_bit_for_bit(
    llama: Twin, make_samples: MakeSamples, tmp_path: Path
) -> None:
    whole = trainer_of(llama)
    whole.begin(2)
    advance(whole, llama, make_samples, 2)  # an earlier arm: versions and steps differ
    whole.begin(6)
    expected = advance(whole, llama, make_samples, 6)

    killed = trainer_of(llama)
    killed.begin(2)
    advance(killed, llama, make_samples, 2)
    killed.begin(6)
    advance(killed, llama, make_samples, 3)
    position = {"arm": "on_policy", "step": 3, "order": [2, 0, 1]}
    path = killed.save(tmp_path, position, 6)
    assert path == tmp_path / "version-000006"

    resumed = trainer_of(llama)
    assert resumed.restore(read_checkpoint(path)) == position
    assert resumed.version == 6
    assert advance(resumed, llama, make_samples, 3) == expected[3:]  # kl, norm, rate: all equal
    assert resumed.version == whole.version == 9
    assert parts(resumed).keys() == {"trainable", "frozen", "step", "exp_avg", "exp_avg_sq"}
    for name, tensor in parts(whole).items():
        assert torch.equal(parts(resumed)[name], tensor), name


def test_a_checkpoint_before_the_first_step(
    llama: Twin, make_samples: MakeSamples, tmp_path: Path
) -> None:
    """No moments yet; and an arm whose warm-up is shorter than the config's."""
    whole = trainer_of(llama)
    whole.begin(2)
    path = whole.save(tmp_path, {}, 0)
    resumed = trainer_of(llama)
    resumed.restore(read_checkpoint(path))
    assert advance(resumed, llama, make_samples, 2) == advance(whole, llama, make_samples, 2)
    assert torch.equal(resumed.bank.trainable, whole.bank.trainable)


def test_the_whole_bank_comes_from_the_checkpoint(llama: Twin, tmp_path: Path) -> None:
    """Document KV read again elsewhere may differ in its last bits; the cartridges must not."""
    first = trainer_of(llama)
    checkpoint = saved(first, tmp_path)
    again = CartridgeTrainer(llama.model, {n: llama.kv[n] * 1.001 for n in "ab"}, CONFIG)
    again.restore(checkpoint)
    assert torch.equal(again.bank.kv(), first.bank.kv())


def test_training_on_after_a_save_does_not_reach_into_a_restored_twin(
    llama: Twin, make_samples: MakeSamples, tmp_path: Path
) -> None:
    first = trainer_of(llama)
    first.begin(9)
    advance(first, llama, make_samples, 1)
    saved = read_checkpoint(first.save(tmp_path, {}, 1))
    second = trainer_of(llama)
    second.restore(saved)
    before = {name: tensor.clone() for name, tensor in saved.tensors.items()}
    advance(second, llama, make_samples, 1)
    assert all(torch.equal(saved.tensors[name], tensor) for name, tensor in before.items())


def test_rates_follow_the_arm_own_schedule(llama: Twin, make_samples: MakeSamples) -> None:
    trainer = trainer_of(llama)
    trainer.begin(4)
    # Two steps of warm-up, then the cosine from 1 to .1, at 0 and half-way.
    rates = [r.lr for r in advance(trainer, llama, make_samples, 4)]
    assert rates == pytest.approx([0.01, 0.02, 0.02, 0.011])
    trainer.begin(2)  # too short for two: warm-up takes half of an arm at most
    rates = [r.lr for r in advance(trainer, llama, make_samples, 2)]
    assert rates == pytest.approx([0.02, 0.02])


def test_every_arm_starts_untrained_and_no_version_comes_twice(
    llama: Twin, make_samples: MakeSamples, tmp_path: Path
) -> None:
    trainer = trainer_of(llama)
    untrained = trainer.bank.trainable.detach().clone()
    assert trainer.begin(3) == 0
    first = advance(trainer, llama, make_samples, 3)
    assert trainer.version == 3
    assert not torch.equal(trainer.bank.trainable, untrained)
    assert trainer.begin(3) == 4
    assert torch.equal(trainer.bank.trainable, untrained)
    assert trainer._optimizer.state == {}
    path = trainer.save(tmp_path, {}, 4)
    resumed = trainer_of(llama)
    resumed.restore(read_checkpoint(path))
    assert resumed.begin(3) == 5
    assert first[0].lr == 0.02  # warm-up was one step of three


@pytest.mark.parametrize("version", [0, 2])
def test_a_step_on_another_version_is_refused(
    llama: Twin, make_samples: MakeSamples, version: int
) -> None:
    trainer = trainer_of(llama)
    trainer.begin(5)
    advance(trainer, llama, make_samples, 1)
    before = trainer.bank.trainable.detach().clone()
    with pytest.raises(
        StaleTokenError,
        match=f"asked to train version {version}, and the trainer stands at 1: a step was lost",
    ):
        trainer.step(make_samples(("a", 4, 5), version=version), Teacher(), version)
    assert torch.equal(trainer.bank.trainable, before)
    assert trainer.version == 1


def test_a_refused_batch_makes_no_version(llama: Twin, make_samples: MakeSamples) -> None:
    trainer = trainer_of(llama, config=replace(CONFIG, staleness=1))
    trainer.begin(5)
    advance(trainer, llama, make_samples, 3)
    samples = make_samples(("a", 4, 5), version=1)
    teacher = Teacher(logits=score(llama.model, samples, llama.cached(), 64))
    with pytest.raises(StaleTokenError, match=r"train\.staleness 1"):
        trainer.step(samples, teacher, 3)
    assert trainer.version == 3
    fresh = [replace(s, versions=(2,) * 5) for s in samples]
    assert trainer.step(fresh, teacher, 3).stale_tokens == 5
    assert trainer.version == 4


def test_a_snapshot_keeps_what_it_was_published_with(
    llama: Twin, make_samples: MakeSamples
) -> None:
    trainer = trainer_of(llama)
    trainer.begin(5)
    version, names, kv = trainer.snapshot()
    assert (version, names) == (0, ("a", "b"))
    assert torch.equal(kv[1], llama.kv["b"][:, :, :, :6])
    before = kv.clone()
    advance(trainer, llama, make_samples, 2)
    assert torch.equal(kv, before)
    assert trainer.snapshot()[0] == 2
    assert not torch.equal(trainer.snapshot()[2], before)


def test_snapshots_are_published_in_the_asked_dtype(llama: Twin) -> None:
    trainer = trainer_of(llama, config=replace(CONFIG, publish_dtype="bfloat16"))
    trainer.begin(1)
    assert torch.equal(trainer.snapshot()[2], trainer.bank.kv().detach().bfloat16())
    assert trainer.bank.trainable.dtype == torch.float32


def test_the_newest_checkpoints_are_kept(
    llama: Twin, make_samples: MakeSamples, tmp_path: Path
) -> None:
    trainer = trainer_of(llama)
    trainer.begin(5)
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
    trainer.begin(5)
    advance(trainer, llama, make_samples, 1)
    with pytest.raises(
        CheckpointError, match=f"trainer stands at version 1 and the position at {version}: a step"
    ):
        trainer.save(tmp_path, {}, version)
    assert list_checkpoints(tmp_path) == []


def saved(trainer: CartridgeTrainer, directory: Path) -> Checkpoint:
    trainer.begin(5)
    return read_checkpoint(trainer.save(directory, {}, 0))


def test_a_checkpoint_of_another_base_model_is_refused(llama: Twin, tmp_path: Path) -> None:
    checkpoint = saved(trainer_of(llama), tmp_path)
    model = load_model(str(llama.path))
    model.lm_head.weight[0, 0] += 1
    other = CartridgeTrainer(model, {n: llama.kv[n] for n in "ab"}, CONFIG)
    with pytest.raises(CheckpointError, match="made with other base weights; resume with the mod"):
        other.restore(checkpoint)


@pytest.mark.parametrize(
    ("names", "config"),
    [
        ("ac", CONFIG),
        ("abc", CONFIG),
        ("ab", replace(CONFIG, tokens=7)),
        # As many trainable tokens, one frozen token more.
        ("ab", replace(CONFIG, tokens=7, frozen=2)),
    ],
)
def test_a_checkpoint_of_other_cartridges_is_refused(
    llama: Twin, tmp_path: Path, names: str, config: TrainerConfig
) -> None:
    checkpoint = saved(trainer_of(llama), tmp_path)
    other = trainer_of(llama, names, config)
    before = other.bank.kv().detach().clone()
    with pytest.raises(
        CheckpointError,
        match=r"holds cartridges \['a', 'b'\] of shapes .* resume with the spec of its run",
    ):
        other.restore(checkpoint)
    assert torch.equal(other.bank.kv(), before)
    assert other.version == -1


def test_the_base_hash_is_that_of_the_weights_now(llama: Twin) -> None:
    assert trainer_of(llama).base_hash() == base_hash(llama.model)
