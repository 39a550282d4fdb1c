"""Measure this machine's ceilings for a plan: a second of products and copies, without torch."""

from __future__ import annotations

import time
from collections.abc import Callable

from cartridge_forge.forge_run.plan.roofline import DevicePeaks
from cartridge_forge.protocols.spec.mesh import RunSpec

SIDE = 1024  # of the square matrices, whose product is bound by compute
COPIED = 1 << 26  # bytes, beyond a processor's caches
SECONDS = 0.5  # of each of the two measurements


def computes_here(spec: RunSpec) -> bool:
    """Return whether every role of the run computes on this machine's processor."""
    return spec.mesh.hosts.kind == "local" and not any(role.gpus for _, role in spec.roles)


def host_peaks() -> DevicePeaks:
    """Return the best float32 FLOP/s of a matrix product and the best bytes/s of a copy, read and
    written, over all cores that numpy uses. A loaded machine gives less."""
    import numpy as np

    a = np.ones((SIDE, SIDE), dtype=np.float32)
    product, source = np.empty_like(a), np.zeros(COPIED, dtype=np.uint8)
    target = np.empty_like(source)
    flops = 2 * SIDE**3 / least_seconds(lambda: np.matmul(a, a, out=product))
    bandwidth = 2 * COPIED / least_seconds(lambda: np.copyto(target, source))
    return DevicePeaks("this machine", flops, bandwidth, link=bandwidth, mfu=1.0)


def least_seconds(
    work: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the least seconds that `work` took, repeated for SECONDS, and twice at least."""
    start, took = clock(), list[float]()
    while len(took) < 2 or clock() - start < SECONDS:
        started = clock()
        work()
        took.append(clock() - started)
    return min(took)
