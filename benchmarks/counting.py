"""What a piece of torch code does, counted while it runs (on fake tensors too): FLOPs, memory
traffic, kernels, and what is kept for a backward.

    with counted() as count:
        loss.backward()
    print(count.flops, count.traffic, count.kernels)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten
# Ops that touch no memory though their schema does not say that they give a view.
FREE = {aten._unsafe_view, aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided}
# Ops that read of their first input only what they give.
GATHERS = {aten.embedding, aten.index, aten.gather, aten.index_select}


@dataclass
class Count:
    """`flops` of matrix products. `traffic`, bytes: what every op reads and writes, as if nothing
    stayed in a cache and no two ops were fused. `kernels`, ops that launch something. `saved`,
    bytes kept for a backward, weights not among them."""

    flops: int = 0
    traffic: int = 0
    kernels: int = 0
    saved: int = 0


@contextmanager
def counted(parameters: Iterator[Tensor] | None = None) -> Iterator[Count]:
    """Count what is done inside. `parameters` are not counted as saved."""
    count = Count()
    known = {p.untyped_storage()._cdata for p in parameters or ()}
    kept: dict[int, Any] = {}  # storages, which live on: their ids are not given twice

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known and storage._cdata not in kept:
            kept[storage._cdata] = storage
            count.saved += storage.nbytes()
        return tensor

    with (
        FlopCounterMode(display=False) as flops,
        _Traffic(count),
        saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        yield count
    count.flops = flops.get_total_flops()


class _Traffic(TorchDispatchMode):
    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or func.overloadpacket in FREE or func.namespace != "aten":
            return out
        written = sum(map(_bytes, _tensors(out)))
        gathers = func.overloadpacket in GATHERS
        read = written if gathers else sum(map(_bytes, _tensors((args, kwargs))))
        if read + written:
            self._count.traffic += read + written
            self._count.kernels += 1
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """What a tensor's elements occupy; an expanded one has fewer than its shape says."""
    return min(tensor.numel() * tensor.element_size(), int(tensor.untyped_storage().nbytes()))
