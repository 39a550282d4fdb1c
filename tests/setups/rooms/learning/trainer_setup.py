"""A trainer of a tiny twin, its state, and its end at any place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from twins import Twin

from cartridge_forge.learning import decoder as linear
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


LOW_BITS = 16  # of a float32 that bfloat16 has not


def rounded(exact: Tensor, draws: torch.Generator) -> Tensor:
    """Return the numbers as one of their two neighbours in bfloat16, drawn so that the mean is
    right; numbers that are bfloat16 stay."""
    bits = exact.float().view(torch.int32)
    noise = torch.randint(1 << LOW_BITS, bits.shape, generator=draws, dtype=torch.int32)
    return (bits + noise).bitwise_and(-1 << LOW_BITS).view(torch.float32).bfloat16()


class _RandomRounding(TorchDispatchMode):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self._draws = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = dict(kwargs or {})
        changes = func._schema.is_mutable  # its first argument, which it returns
        found = args[0] if changes else func(*args, **kwargs)
        if not isinstance(found, Tensor) or found.dtype != torch.bfloat16 or func.is_view:
            return func(*args, **kwargs) if changes else found
        exact = func(*tree_map(_wide, tuple(args)), **tree_map(_wide, kwargs))
        return found.copy_(rounded(exact, self._draws))


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return torch.float64 if value is torch.bfloat16 else value


@contextmanager
def random_rounding(seed: int) -> Iterator[None]:
    """Round every bfloat16 result of this thread at random, by torch's own products on any
    processor."""
    with pytest.MonkeyPatch.context() as patched, _RandomRounding(seed):
        patched.setattr(linear, "SMALLEST", {})
        yield
