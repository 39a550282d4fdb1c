"""A cartridge of another trainer's file: trained on, its frozen tokens go out as they came in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from cartridge_forge.learning.checkpoint import read_checkpoint
from cartridge_forge.learning.initialization import CartridgeInit, initial_bank
from cartridge_forge.learning.losses.doc_kl import doc_batch
from cartridge_forge.learning.teacher import TeacherDistribution, score
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.library.formats import convert, run_checkpoint
from cartridge_forge.protocols.spec.sections import TrainSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from twins import Twin

    from cartridge_forge.protocols.step import Sample

    MakeSamples = Callable[..., list[Sample]]


CONFIG = TrainSpec(steps=3, lr=0.02, row_tokens=20)


def train(trainer: CartridgeTrainer, twin: Twin, make_samples: MakeSamples) -> None:
    for version in range(3):
        samples = make_samples(("a", 4, 5), ("b", 2, 3), seed=version, version=version)
        teacher = TeacherDistribution(logits=score(twin.model, samples, twin.cached(), 64))
        trainer.step(doc_batch(samples, teacher), version)


def foreign(twin: Twin, file: Path, spelling: str, frozen: int) -> Path:
    """A `.pt` as HazyResearch's code writes it: no label of ours; -0.0 and a subnormal number among
    the frozen ones."""
    kv = twin.kv["c"][:, :, :, :14] * 1.25
    kv[0, 0, 0, 0, :2] = torch.tensor([-0.0, 1e-40])
    lists = {}
    for part, kept in ((f"{spelling}_", slice(frozen)), ("trainable_", slice(frozen, None))):
        for kind, word in enumerate(("keys", "values")):
            layers = [layer[kind, :, kept][None].clone() for layer in kv]
            lists[part + word] = torch.nn.ParameterList(torch.nn.Parameter(x) for x in layers)
    torch.save(lists, file)
    return file


def bits(kv: torch.Tensor) -> torch.Tensor:
    return kv.contiguous().view(torch.int32)


@pytest.mark.parametrize("spelling", ["frozen", "fixed"])
@pytest.mark.parametrize("frozen", [8, 0])
def test_three_steps_change_every_trained_token_and_no_bit_of_a_frozen_one(
    llama: Twin, make_samples: MakeSamples, tmp_path: Path, spelling: str, frozen: int
) -> None:
    before = convert.read(foreign(llama, tmp_path / "in.pt", spelling, frozen))
    assert (before.frozen, before.tokens) == (frozen, 14)
    given = {name: (before.kv, before.frozen) for name in "ab"}
    bank = initial_bank(llama.model, [], CartridgeInit("first_tokens", 14, 1), given)
    trainer = CartridgeTrainer(llama.model, bank, CONFIG)
    trainer.begin("on_policy", 3)
    assert torch.equal(bits(trainer.snapshot(0).kv["a"]), bits(before.kv))  # the untrained arm
    train(trainer, llama, make_samples)

    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    checkpoint = trainer.save(tmp_path / "run" / "checkpoints", {}, 3)
    convert.convert(run_checkpoint.read(tmp_path / "run", "b"), tmp_path / "out.pt", "hazy")
    after = convert.read(tmp_path / "out.pt")
    assert after.frozen == frozen
    assert torch.equal(bits(after.kv[..., :frozen, :]), bits(before.kv[..., :frozen, :]))
    moved = (after.kv - before.kv)[..., frozen:, :].abs()
    assert moved.amax(dim=(1, 2, 4)).min() > 0, "of every token in every layer"

    again = CartridgeTrainer(
        llama.model, initial_bank(llama.model, [], CartridgeInit("x", 14, 1), given), CONFIG
    )
    again.restore(read_checkpoint(checkpoint))
    assert all(
        torch.equal(bits(one), bits(other))
        for one, other in zip(again.bank.kv(), trainer.bank.kv(), strict=True)
    )
