"""What a device really reaches: FLOP/s of a large matrix product, bytes/s of a large copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from forge_run.plan.roofline import Device


def synchronize(device: torch.device) -> None:
    """Wait for what was launched: without it a GPU's time is that of the launches."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device, times: int) -> float:
    """The median of `times` runs, after one that does not count."""
    laps = []
    for _ in range(times + 1):
        synchronize(device)
        begun = time.perf_counter()
        work()
        synchronize(device)
        laps.append(time.perf_counter() - begun)
    return statistics.median(laps[1:])


def measured(device: torch.device, dtype: torch.dtype) -> Device:
    """The device's ceilings in this run: its memory's bandwidth counts bytes read and written, its
    link's those that reach the host (on a CPU: a copy, which crosses no link)."""
    large = device.type == "cuda"
    n = 8192 if large else 512
    a = torch.ones(n, n, dtype=dtype, device=device)
    flops = 2 * n**3 / seconds(lambda: a @ a, device, 20)
    size = 2 << 30 if large else 64 << 20
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * size / seconds(lambda: target.copy_(source), device, 10)
    piece = source[: 256 << 20]
    host = torch.empty_like(piece, device="cpu", pin_memory=large)
    link = piece.nbytes / seconds(lambda: host.copy_(piece), device, 10)
    if large:
        del source, target, piece
        torch.cuda.empty_cache()  # the step needs the room
    name = torch.cuda.get_device_name(device) if large else "cpu"
    return Device(f"{name}, measured", flops, bandwidth, link, mfu=1.0)
