"""A trainer of a tiny twin, its state, and its end at any place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from twins import Twin

from cartridge_forge.learning.cartridge import first_tokens
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.protocols.spec.sections import TrainSpec

CONFIG = TrainSpec(steps=100, lr=0.02, warmup_steps=2, row_tokens=20)


def trainer_of(
    twin: Twin,
    names: str = "ab",
    config: TrainSpec = CONFIG,
    last_state: Path | None = None,
    tokens: int = 6,
    frozen: int = 1,
    **more: Any,
) -> CartridgeTrainer:
    """Return a trainer of a cartridge for each name."""
    bank = first_tokens({n: twin.kv[n] for n in names}, tokens, frozen)
    return CartridgeTrainer(twin.model, bank, config, last_state, **more)


def parts(trainer: CartridgeTrainer) -> dict[str, torch.Tensor]:
    """Every tensor of the trainer's state, by its cartridge."""
    state = trainer._state.checkpoint({})
    return {
        f"{cartridge}/{name}": tensor
        for cartridge in trainer.bank.names
        for name, tensor in state.cartridge(cartridge).items()
    }


def copied(trainer: CartridgeTrainer) -> dict[str, torch.Tensor]:
    """Return a copy of the state that later steps leave alone."""
    return {name: tensor.detach().clone() for name, tensor in parts(trainer).items()}


def same(here: dict[str, torch.Tensor], there: dict[str, torch.Tensor]) -> None:
    """Assert two states equal to the bit."""
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        assert torch.equal(tensor, there[name]), name


class Killed(Exception):
    """The trainer's process ended here."""


def killed() -> None:
    """End the process here."""
    raise Killed
