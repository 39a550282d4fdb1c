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

import asyncio
import statistics
import time
import warnings
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMABuffer

from benchmarks.record import arguments, median_ratio, provenance, write
from services.planes.open import PlaneKind, open_plane

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


Move = Callable[[Any, int], Awaitable[tuple[float, float, float, float]]]


def through_plane(plane: Any, reader: Any) -> Move:
    """Return a function that measures seconds of put, get, read and delete of one tensor."""

    async def move(source: Any, turn: int) -> tuple[float, float, float, float]:
        began = time.perf_counter()
        packet = await plane.put(f"bench/{source.nbytes}/{turn}", {"x": source})
        put = time.perf_counter() - began
        get, read = await reader.read.call_one(plane, packet)
        began = time.perf_counter()
        await plane.delete(packet.key)
        return put, get, read, time.perf_counter() - began

    return move


def by_message(reader: Any) -> Move:
    async def move(source: Any, turn: int) -> tuple[float, float, float, float]:
        began = time.perf_counter()
        read = await reader.take.call_one(source)
        return 0.0, time.perf_counter() - began - read, read, 0.0

    return move


def by_rdma(reader: Any) -> Move:
    async def move(source: Any, turn: int) -> tuple[float, float, float, float]:
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without RDMA it warns for every buffer
            buffer = RDMABuffer(source)
        put = time.perf_counter() - began
        get, read = await reader.pull.call_one(buffer, source.nbytes)
        began = time.perf_counter()
        await buffer.drop()
        return put, get, read, time.perf_counter() - began

    return move


async def measure(name: str, move: Move, size: int) -> dict[str, Any]:
    """Return median milliseconds of each operation on one tensor of `size` bytes, and of a copy of
    it; and the ratio of put, get and read together to the copy, pair by pair."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros_like(source)
    laps = []
    for turn in range(repetitions(size) + 1):
        moved = await move(source, turn)
        began = time.perf_counter()
        target.copy_(source)
        laps.append((time.perf_counter() - began, *moved))
    times = list(zip(*laps[1:], strict=True))  # the first run opens connections and grows heaps
    medians = [round(1e3 * statistics.median(t), 4) for t in times]
    ratio = median_ratio([sum(lap[1:4]) for lap in laps[1:]], times[0])
    row = dict(zip(COLUMNS, medians, strict=True))
    return {"transport": name, "bytes": size, **row, "over_memcpy": round(ratio, 2)}


class PlaneReader(Actor):
    """Get tensors in another process, and read every byte once; methods return both seconds."""

    @endpoint
    async def read(self, plane: Any, packet: Any) -> tuple[float, float]:
        began = time.perf_counter()
        tensors = await plane.get(packet)
        return time.perf_counter() - began, _read(tensors["x"])

    @endpoint
    async def take(self, tensor: Any) -> float:
        return _read(tensor)

    @endpoint
    async def pull(self, buffer: Any, size: int) -> tuple[float, float]:
        began = time.perf_counter()
        target = torch.empty(size, dtype=torch.uint8)
        await buffer.read_into(target)
        return time.perf_counter() - began, _read(target)


async def run(max_mb: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    storage = this_host().spawn_procs(per_host={"gpus": 1}, name="storage")
    reading = this_host().spawn_procs(per_host={"gpus": 1}, name="reading")
    reader = reading.spawn("reader", PlaneReader)
    rows = []

    async def all_sizes(name: str, move: Move) -> None:
        for size in sizes_up_to(max_mb):
            rows.append(await measure(name, move, size))
            print(line(rows[-1]), flush=True)

    for kind in PLANES:
        plane = await open_plane(kind, storage)
        await all_sizes(kind, through_plane(plane, reader))
        await plane.stop()
    await all_sizes("message", by_message(reader))
    await all_sizes("rdma", by_rdma(reader))
    await storage.stop()
    await reading.stop()
    return rows


def _read(tensor: Any) -> float:
    torch.set_num_threads(1)
    began = time.perf_counter()
    tensor.view(torch.int64).sum()
    return time.perf_counter() - began


def line(row: dict[str, Any]) -> str:
    size = f"{row['bytes'] // 1024:,} KB" if row["bytes"] < MEGABYTE else f"{row['bytes'] >> 20} MB"
    cells = [f"{row['transport']:<14}{size:>8}", *(f"{row[name]:>10.3f}" for name in COLUMNS)]
    return "".join([*cells, f"{row['over_memcpy']:>11.1f}x"])


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


def main() -> None:
    parser = arguments(__doc__, "tensor_plane")
    parser.add_argument("--max-mb", type=int, default=512, choices=(1, 4, 16, 64, 256, 512))
    options = parser.parse_args()
    max_mb = min(options.max_mb, 16) if options.quick else options.max_mb
    told = provenance("tensor_plane", vars(options) | {"max_mb": max_mb, "threads": 1})
    header = "".join(f"{name:>10}" for name in COLUMNS)
    print(f"{'transport':<14}{'size':>8}{header}{'over memcpy':>12}")
    rows = asyncio.run(run(max_mb))
    fitted = costs(rows)
    for name, cost in fitted.items():
        print(
            f"{name:<14} {1e3 * cost.operation_s:8.3f} ms + bytes / {cost.bandwidth / 1e9:.2f} GB/s"
        )
    ratios = {
        f"{row['transport']}, {row['bytes'] >> 20} MB moved over memcpy": row["over_memcpy"]
        for row in rows
        if row["bytes"] in (16 * MEGABYTE, 512 * MEGABYTE)
    }
    results = {"milliseconds": rows, "fitted": {n: vars(c) for n, c in fitted.items()}}
    write(options.out, told, ratios, results)


if __name__ == "__main__":
    main()
