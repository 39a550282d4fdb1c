"""Measure what code costs: processor time, memory, operations; and print rows of figures."""

from __future__ import annotations

import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from cartridge_forge.actors.base import keep_freed_memory
from cartridge_forge.learning.model.loading import flush_denormals

aten = torch.ops.aten
# Ops that touch no memory, although their schema does not declare a view.
FREE = {aten._unsafe_view, aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided}
# Ops that read only as much of their first input as they return.
GATHERS = {aten.embedding, aten.index, aten.gather, aten.index_select}


def _attention_flops(
    query: Sequence[int], key: Sequence[int], *_: Any, out_shape: Any = None, **__: Any
) -> int:
    """Count the products of scores and weighted values, hidden ones too."""
    rows, heads, queries, size = query
    return 4 * rows * heads * queries * key[2] * size


def _attention_backward_flops(grad: Sequence[int], *shapes: Any, **named: Any) -> int:
    """Count five products: the scores once more, and two gradients of each forward product."""
    return _attention_flops(shapes[0], shapes[1]) * 5 // 2


def _linear_flops(
    x: Sequence[int], weight: Sequence[int], *_: Any, out_shape: Any = None, **__: Any
) -> int:
    """Count the products of rows [n, in] by a weight [out, in]."""
    return 2 * math.prod(x) * weight[0]


# torch counts no products of oneDNN, nor of the CPU's own attention.
ONEDNN = {torch.ops.mkldnn._linear_pointwise: _linear_flops}
ON_CPU = {
    **ONEDNN,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def processor_seconds(pid: int, reaped: bool = False) -> float:
    """Return a process's processor seconds, in kernel ticks; if `reaped`, with those of children it
    waited for. Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if reaped else 13])) / os.sysconf("SC_CLK_TCK")


class Laps:
    """Hold the seconds between the ends of named parts, by a clock: processor seconds of this
    process (`time.process_time`) leave out other users of the cores and waiting for the disk."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock, self._begun = clock, clock()

    def done(self, part: str) -> None:
        now = self._clock()
        self.seconds[part] = now - self._begun
        self._begun = now


class FigureTable:
    """Collect rows of figures, and print each in columns as it comes: `{"size": 8, "ms":
    {"put": 1.5}}` under the heads `size` and `ms.put`."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        cells = dict(_cells(row))
        if not self.rows:
            self._widths = {
                n: max(len(n), 28 if isinstance(c, str) else 9) for n, c in cells.items()
            }
            print("  ".join(f"{name:>{width}}" for name, width in self._widths.items()))
        self.rows.append(row)
        texts = [f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells.values()]
        widths = self._widths.values()
        print("  ".join(f"{t:>{w}}" for t, w in zip(texts, widths, strict=False)), flush=True)


def _cells(row: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _cells(value, f"{above}{name}.")
        else:
            yield above + name, value


def one_thread() -> None:
    """Compute in one thread, with memory and denormal numbers as in the actors' processes."""
    torch.set_num_threads(1)
    keep_freed_memory()
    flush_denormals()


def resident_mb(which: str) -> float:
    """Return MiB of this process's memory, as Linux counts it: now (VmRSS), or the peak (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{which}:")[1].split()[0]) / 1024


def grown_mb(work: Callable[[], object]) -> float:
    """Return this process's peak memory during `work`, in MiB above its start."""
    resident = resident_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    work()
    return resident_mb("VmHWM") - resident


def in_a_process(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run `work` in a fork of this process and return its result. The process has computed nothing
    with gradients yet; the fork's peak starts at the shared memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "told"
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=lambda: torch.save(work(), path))
        child.start()
        child.join()
        if child.exitcode != 0:
            raise SystemExit(f"a measurement ended with exit code {child.exitcode}")
        result: dict[str, Any] = torch.load(path, weights_only=True)
        return result


class LiveTensors(TorchDispatchMode):
    """Record tensors that operations return, except views of `tensors`: the most numbers of one
    (`largest`), and the most bytes alive at once (`peak`)."""

    def __init__(self, *tensors: Tensor | None) -> None:
        super().__init__()
        self.largest = self.peak = 0
        self._given = {x.untyped_storage()._cdata for x in tensors if x is not None}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self._given:
                storage = x.untyped_storage()
                self.largest = max(self.largest, x.numel())
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {k: entry for k, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


@dataclass
class Count:
    """Hold counts. `flops`: of matrix products. `traffic`: bytes that every op reads and writes, as
    if nothing stayed in a cache and no two ops were fused. `kernels`: ops that launch something.
    `saved`: bytes kept for a backward, without weights."""

    flops: int = 0
    traffic: int = 0
    kernels: int = 0
    saved: int = 0


@contextmanager
def counted(parameters: Iterator[Tensor] | None = None) -> Iterator[Count]:
    """Count the block's work, on one thread: the counters see their own alone, and not the passes
    that run beside each other (`learning.ranks`). `parameters` are not counted as saved."""
    count = Count()
    parameter_ids = {p.untyped_storage()._cdata for p in parameters or ()}
    storages: dict[int, Any] = {}  # storages, kept alive so that no id is reused

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameter_ids and storage._cdata not in storages:
            storages[storage._cdata] = storage
            count.saved += storage.nbytes()
        return tensor

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            FlopCounterMode(display=False, custom_mapping=ON_CPU) as flops,
            _Traffic(count),
            saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            yield count
    finally:
        torch.set_num_threads(threads)
    count.flops = flops.get_total_flops()


class _Traffic(TorchDispatchMode):
    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or func.overloadpacket in FREE or func.namespace != "aten":
            return out
        nbytes = _bytes(out)
        read = nbytes if func.overloadpacket in GATHERS else _bytes((args, kwargs))
        if read + nbytes:
            self._count.traffic += read + nbytes
            self._count.kernels += 1
        return out


def _bytes(tree: Any) -> int:
    """Return bytes of the tensors' elements; an expanded one has fewer than its shape suggests."""
    return sum(
        min(leaf.numel() * leaf.element_size(), int(leaf.untyped_storage().nbytes()))
        for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor)
    )
