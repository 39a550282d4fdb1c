"""Every transport of tensors between two processes of a host, against memcpy, within one run.

    python -m benchmarks.tensor_plane [--max-mb 512] [--quick]

    torchstore      the plane for any number of hosts: bytes in a storage process
    shared_memory   the plane of one host: bytes in /dev/shm, mapped by readers
    message         the tensor as an argument of an actor's endpoint; nothing is kept
    rdma            Monarch's RDMABuffer (over TCP where there is no such network); the reader
                    reads the writer's live memory

This process puts and deletes; an actor in another process gets, then reads every byte once (a
mapped get has not touched them yet). Times are medians in milliseconds. Of each transport's moves,
put + get + read, two figures are fitted: the cost of an operation, at sizes up to 16 KB, and the
bandwidth beyond it, at sizes from a quarter of the largest on; what lies between partly fits a
cache. A copy in memory is timed after every move: ratios are of such pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import warnings
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMABuffer
from torch import Tensor

from benchmarks.meters import FigureTable, Laps
from benchmarks.record import benchmark
from cartridge_forge.protocols.ports import TensorPlane
from cartridge_forge.services.planes.open import PlaneKind, open_plane

PLANES: tuple[PlaneKind, ...] = ("torchstore", "shared_memory")
COLUMNS = ("memcpy", "put", "get", "read", "delete")
MEGABYTE = 1 << 20
OPERATION_BYTES = 16 << 10  # up to this size an operation costs more than its bytes
BUDGET_BYTES = 256 << 20  # the repetitions of a size move about this much


@dataclass(frozen=True)
class Cost:
    """Hold a linear cost: seconds = operation_s + bytes / bandwidth."""

    operation_s: float
    bandwidth: float


def sizes_up_to(max_mb: int) -> list[int]:
    """Return sizes in bytes: 1 KB, 16 KB, 256 KB, then megabytes."""
    kib = [1, 16, 256, *(mb * 1024 for mb in (1, 4, 16, 64, 256, 512) if mb <= max_mb)]
    return [1024 * size for size in kib]


def repetitions(size: int) -> int:
    return max(2, min(30, BUDGET_BYTES // size))


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Cost:
    """Return the median over the small sizes, and the time that large ones take beyond it."""
    pairs = list(zip(sizes, seconds, strict=True))
    operation = statistics.median(s for size, s in pairs if size <= OPERATION_BYTES)
    large = [(size, s - operation) for size, s in pairs if size >= max(sizes) / 4]
    return Cost(operation, statistics.median(size / max(s, 1e-9) for size, s in large))


Move = Callable[[Tensor, int], Awaitable[dict[str, float]]]  # seconds by operation


async def through_plane(
    plane: TensorPlane, reader: Any, source: Tensor, turn: int
) -> dict[str, float]:
    """Return seconds of put, get, read and delete of one tensor."""
    laps = Laps()
    packet = await plane.put(f"bench/{source.nbytes}/{turn}", {"x": source})
    laps.done("put")
    reader_seconds = await reader.read.call_one(plane, packet)
    laps.done("there")
    await plane.delete(packet.key)
    laps.done("delete")
    return laps.seconds | reader_seconds


async def by_message(reader: Any, source: Tensor, turn: int) -> dict[str, float]:
    laps = Laps()
    reader_seconds = await reader.take.call_one(source)
    laps.done("get")
    return {"get": laps.seconds["get"] - reader_seconds["read"], **reader_seconds}


async def by_rdma(reader: Any, source: Tensor, turn: int) -> dict[str, float]:
    laps = Laps()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without RDMA it warns for every buffer
        buffer = RDMABuffer(source)
    laps.done("put")
    reader_seconds = await reader.pull.call_one(buffer, source.nbytes)
    laps.done("there")
    await buffer.drop()
    laps.done("delete")
    return laps.seconds | reader_seconds


async def moved(name: str, move: Move, size: int) -> dict[str, Any]:
    """Return median milliseconds of each operation on one tensor of `size` bytes, and of a copy of
    it; and the ratio of put, get and read together to the copy, pair by pair."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros_like(source)
    runs = []
    for turn in range(repetitions(size) + 1):
        seconds = await move(source, turn)
        laps = Laps()
        target.copy_(source)
        laps.done("memcpy")
        runs.append(dict.fromkeys(COLUMNS, 0.0) | seconds | laps.seconds)
    runs = runs[1:]  # the first opens connections and grows heaps
    medians = {c: round(1e3 * statistics.median(run[c] for run in runs), 4) for c in COLUMNS}
    ratio = statistics.median((r["put"] + r["get"] + r["read"]) / r["memcpy"] for r in runs)
    return {"transport": name, "bytes": size, **medians, "over_memcpy": round(ratio, 2)}


class PlaneReader(Actor):
    """Get tensors in another process, and read every byte once; methods return their seconds."""

    @endpoint
    async def read(self, plane: Any, packet: Any) -> dict[str, float]:
        laps = Laps()
        tensors = await plane.get(packet)
        laps.done("get")
        return self._read(tensors["x"], laps)

    @endpoint
    async def take(self, tensor: Any) -> dict[str, float]:
        return self._read(tensor, Laps())

    @endpoint
    async def pull(self, buffer: Any, size: int) -> dict[str, float]:
        laps = Laps()
        target = torch.empty(size, dtype=torch.uint8)
        await buffer.read_into(target)
        laps.done("get")
        return self._read(target, laps)

    def _read(self, tensor: Any, laps: Laps) -> dict[str, float]:
        torch.set_num_threads(1)
        tensor.view(torch.int64).sum()
        laps.done("read")
        return laps.seconds


async def run(max_mb: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    storage = this_host().spawn_procs(per_host={"gpus": 1}, name="storage")
    reading = this_host().spawn_procs(per_host={"gpus": 1}, name="reading")
    reader = reading.spawn("reader", PlaneReader)
    table = FigureTable()

    async def all_sizes(name: str, move: Move) -> None:
        for size in sizes_up_to(max_mb):
            table.add(await moved(name, move, size))

    for kind in PLANES:
        plane = await open_plane(kind, storage)
        await all_sizes(kind, partial(through_plane, plane, reader))
        await plane.stop()
    await all_sizes("message", partial(by_message, reader))
    await all_sizes("rdma", partial(by_rdma, reader))
    await storage.stop()
    await reading.stop()
    return table.rows


def costs(rows: Sequence[dict[str, Any]]) -> dict[str, Cost]:
    """Return the cost of every transport's moves, and of memcpy."""
    sizes: dict[str, list[int]] = {}
    seconds: dict[str, list[float]] = {}
    for row in rows:
        moved = sum(row[name] for name in ("put", "get", "read"))
        for name, value in ((row["transport"], moved), ("memcpy", row["memcpy"])):
            sizes.setdefault(name, []).append(row["bytes"])
            seconds.setdefault(name, []).append(value / 1e3)
    return {name: fit(sizes[name], seconds[name]) for name in sizes}


def measure(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    rows = asyncio.run(run(options.max_mb))
    fitted = {name: vars(cost) for name, cost in costs(rows).items()}
    for name, cost in fitted.items():
        operation_ms, rate = 1e3 * cost["operation_s"], cost["bandwidth"] / 1e9
        print(f"{name:<14} {operation_ms:8.3f} ms + bytes / {rate:.2f} GB/s")
    ratios = {
        f"{row['transport']}, {row['bytes'] >> 20} MB moved over memcpy": row["over_memcpy"]
        for row in rows
        if row["bytes"] in (16 * MEGABYTE, 512 * MEGABYTE)
    }
    return ratios, {"milliseconds": rows, "fitted": fitted}


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {"--max-mb": {"type": int, "default": 512, "choices": (1, 4, 16, 64, 256, 512)}},
        quick={"max_mb": 16},
        config={"threads": 1},
    )
