"""A trainer that died is replaced by one that stands, and publishes, as it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from learning.cartridge.bank import first_tokens
from learning.scoring import TeacherDistribution, score
from learning.trainer import CartridgeTrainer
from protocols.errors import PublishError
from protocols.spec.sections import TrainSpec


def stacked(trainer: CartridgeTrainer, version: int) -> torch.Tensor:
    """What the trainer publishes of a version."""
    return torch.stack(list(trainer.snapshot(version).kv.values()))


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_successor_publishes_what_rollouts_under_way_are_sampled_with(
    staleness: int, llama: Any, make_samples: Any, tmp_path: Path
) -> None:
    config = TrainSpec(steps=3, lr=0.02, warmup_steps=2, row_tokens=64, staleness=staleness)

    def trainer() -> CartridgeTrainer:
        bank = first_tokens(llama.kv, 8, 1)
        return CartridgeTrainer(llama.model, bank, config, tmp_path / "last-state")

    killed = trainer()
    killed.begin("on_policy", 3)
    published = {}
    for version in range(3):
        published[version] = stacked(killed, version)
        samples = make_samples(("a", 4, 5), ("b", 2, 3), seed=version, version=version)
        teacher = TeacherDistribution(logits=score(llama.model, samples, llama.cached(), 64))
        killed.step(samples, teacher, version)
    current = stacked(killed, 3)

    successor = trainer()
    assert successor.recover() == 3
    # Versions 3 - staleness .. 3 may still be asked for, and no older one.
    if staleness:
        assert torch.equal(stacked(successor, 2), published[2])
    with pytest.raises(PublishError, match=f"version {2 - staleness} cannot be published"):
        successor.snapshot(2 - staleness)
    assert torch.equal(stacked(successor, 3), current)
