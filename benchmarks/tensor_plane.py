"""Put, get and delete of both tensor planes against memcpy, within one run.

    python -m benchmarks.tensor_plane [--max-mb 64] [--out tensor_plane.json]

This process puts and deletes; an actor in another process gets, then reads every byte once (a
mapped get has not touched them yet). Times are medians in milliseconds; compare the ratios to
memcpy of the same run, since absolute times depend on who else uses the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.planes import OwnedPlane, PlaneKind

KINDS: tuple[PlaneKind, ...] = ("torchstore", "shared_memory")
COLUMNS = ("memcpy", "put", "get", "read", "delete")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-mb", type=int, default=64, choices=(1, 4, 16, 64, 256, 512))
    parser.add_argument("--out", type=Path, default=Path("tensor_plane.json"))
    return parser.parse_args()


def sizes_up_to(max_mb: int) -> list[int]:
    """Bytes: 1 KB, 16 KB, 256 KB, then megabytes."""
    kib = [1, 16, 256, *(mb * 1024 for mb in (1, 4, 16, 64, 256, 512) if mb <= max_mb)]
    return [1024 * size for size in kib]


def repetitions(size: int) -> int:
    return max(3, min(30, (256 << 20) // size))


def median_ms(seconds: list[float]) -> float:
    return round(1e3 * statistics.median(seconds), 3)


def memcpy_ms(size: int) -> float:
    import torch

    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros_like(source)
    times = []
    for _ in range(repetitions(size)):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return median_ms(times)


async def measure(plane: OwnedPlane, reader: Any, size: int) -> dict[str, float]:
    """Median milliseconds of each operation on one tensor of `size` bytes."""
    import torch

    source = {"x": torch.ones(size, dtype=torch.uint8)}
    times: dict[str, list[float]] = {"put": [], "get": [], "read": [], "delete": []}
    for repetition in range(repetitions(size) + 1):
        began = time.perf_counter()
        packet = await plane.put(f"bench/{size}/{repetition}", source)
        put = time.perf_counter() - began
        get, read = await reader.read.call_one(plane, packet)
        began = time.perf_counter()
        await plane.delete(packet.key)
        delete = time.perf_counter() - began
        if repetition:  # the first one also opens connections and grows heaps
            for name, value in (("put", put), ("get", get), ("read", read), ("delete", delete)):
                times[name].append(value)
    return {name: median_ms(values) for name, values in times.items()}


async def run(max_mb: int) -> list[dict[str, Any]]:
    import torch
    from monarch.actor import Actor, endpoint, this_host

    from services.planes import open_plane

    torch.set_num_threads(1)

    class Reader(Actor):
        @endpoint
        async def read(self, plane: OwnedPlane, packet: Any) -> tuple[float, float]:
            """Seconds to get, and seconds to read every byte once."""
            import torch

            torch.set_num_threads(1)
            began = time.perf_counter()
            tensors = await plane.get(packet)
            got = time.perf_counter()
            tensors["x"].view(torch.int64).sum()
            return got - began, time.perf_counter() - got

    storage = this_host().spawn_procs(per_host={"gpus": 1}, name="storage")
    reading = this_host().spawn_procs(per_host={"gpus": 1}, name="reading")
    reader = reading.spawn("reader", Reader)
    rows = []
    for kind in KINDS:
        plane = await open_plane(kind, storage)
        for size in sizes_up_to(max_mb):
            times = await measure(plane, reader, size)
            rows.append({"plane": kind, "bytes": size, "memcpy": memcpy_ms(size), **times})
            print(line(rows[-1]), flush=True)
        await plane.stop()
    await storage.stop()
    await reading.stop()
    return rows


def line(row: dict[str, Any]) -> str:
    """One row of the table; a ratio is (put) or (get and read) over memcpy."""
    size = f"{row['bytes'] // 1024:,} KB" if row["bytes"] < 1 << 20 else f"{row['bytes'] >> 20} MB"
    ratio = [row["put"] / row["memcpy"], (row["get"] + row["read"]) / row["memcpy"]]
    cells = [f"{row['plane']:<14}{size:>8}", *(f"{row[name]:>10.3f}" for name in COLUMNS)]
    return "".join([*cells, *(f"{value:>11.1f}x" for value in ratio)])


def provenance(max_mb: int) -> dict[str, Any]:
    from importlib.metadata import version

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    packages = ("torch", "torchmonarch", "torchstore")
    return {
        "config": {"max_mb": max_mb, "threads": 1, **{name: version(name) for name in packages}},
        "device": f"cpu, {platform.machine()}, {platform.system()} {platform.release()}",
        "commit": git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else ""),
        "command": " ".join(["python -m benchmarks.tensor_plane", *sys.argv[1:]]),
        "unit": "median milliseconds",
    }


def main() -> None:
    arguments = parse_arguments()
    header = "".join(f"{name:>10}" for name in COLUMNS)
    print(f"{'plane':<14}{'size':>8}{header}{'put':>12}{'get+read':>12}")
    rows = asyncio.run(run(arguments.max_mb))
    arguments.out.write_text(
        json.dumps({**provenance(arguments.max_mb), "rows": rows}, indent=1) + "\n"
    )
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
