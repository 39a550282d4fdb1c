"""Passes that round to bfloat16 at random: how far rounding alone may move a result.

A processor sums a product in float32, in an order of its own, and rounds it to the nearest
bfloat16. Where a sum lies between two of them, another order gives the other one, and the next
products go on from there; so no single processor's error is a bound for others. Here each result is
computed in float64 and rounded up or down at random, in proportion: its error has twice the
variance of rounding to nearest, and is independent of every other. Errors of such passes are an
upper estimate of those of any processor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from cartridge_forge.learning import decoder as linear

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
