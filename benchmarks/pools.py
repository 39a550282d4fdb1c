"""Calls per second through a pool of 1 to 8 replicas, of actors that answer at once and that wait.

    python -m benchmarks.pools [--seconds 3] [--quick]

    trivial    answers at once: what routing itself can carry; all replicas share this client
    waiting    waits 50 ms as one that asks a network does: ideal is 20 calls/s for each call that a
               replica has in hand
    bare       the trivial actor called without a pool, for what routing adds

A closed loop keeps `max_ongoing` calls of every replica in flight. Efficiency is the rate of n
replicas over n times the rate of one. With 100 calls in flight on two replicas, routed and bare
calls take turns; their ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from monarch.actor import Actor, concurrent_endpoint, this_host

from benchmarks.meters import FigureTable, Laps
from benchmarks.record import benchmark
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.services.pool.service import Service

WAIT_S = 0.05
SIZES = (1, 2, 4, 8)
ONGOING = 4  # concurrent calls of one replica
CROWD, ROUNDS = 100, 5  # calls in flight on two replicas, and rounds of routed and bare ones
TIMEOUT_S = 120.0


class BenchWorker(Actor):
    """Reply at once, or after WAIT_S; `pull` gets a tensor from a plane, reads every byte once,
    and returns the seconds of both."""

    @concurrent_endpoint
    async def ready(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def echo(self, items: Any = None) -> Any:
        return items

    @concurrent_endpoint
    async def waiting(self) -> None:
        await asyncio.sleep(WAIT_S)

    @concurrent_endpoint
    async def load(self, version: int) -> int:
        return version

    @concurrent_endpoint
    async def pull(self, plane: Any, packet: Any) -> dict[str, float]:
        laps = Laps()
        tensors = await plane.get(packet)
        laps.done("get")
        tensors["x"].sum()
        laps.done("read")
        return laps.seconds


async def rate(ask: Callable[[], Awaitable[Any]], together: int, seconds: float) -> float:
    """Return calls per second with `together` of them always in flight."""
    count = 0
    await asyncio.gather(*(ask() for _ in range(together)))  # opens connections
    start = time.perf_counter()

    async def caller() -> None:
        nonlocal count
        while time.perf_counter() < start + seconds:
            await ask()
            count += 1

    await asyncio.gather(*(caller() for _ in range(together)))
    return count / (time.perf_counter() - start)


async def alone_ms(ask: Callable[[], Awaitable[Any]], calls: int = 500) -> float:
    """Return the median milliseconds of a call, made in sequence."""
    laps = []
    for _ in range(calls):
        start = time.perf_counter()
        await ask()
        laps.append(time.perf_counter() - start)
    return 1e3 * statistics.median(laps)


async def crowded(service: Service, seconds: float) -> tuple[float, float]:
    """Return calls per second, routed and bare, with CROWD in flight on two replicas each."""
    spec = RoleSpec(replicas=2, max_ongoing=CROWD // 2)
    pool = service.spawn(BenchWorker, role="crowded", spec=spec)
    await pool.settled(TIMEOUT_S)
    meshes = [this_host().spawn_procs(per_host={"procs": 1}, name=f"crowd{i}") for i in range(2)]
    turns = itertools.cycle([m.spawn("crowd", BenchWorker).echo.call_one for m in meshes])

    async def bare() -> Any:
        return await next(turns)()

    rates: dict[str, list[float]] = {"routed": [], "bare": []}
    for _ in range(ROUNDS):
        for name, ask in (("routed", partial(pool.route, "echo")), ("bare", bare)):
            rates[name].append(await rate(ask, CROWD, seconds))
    for mesh in meshes:
        await mesh.stop()
    return statistics.median(rates["routed"]), statistics.median(rates["bare"])


async def run(seconds: float) -> tuple[dict[str, float], dict[str, Any]]:
    """Return ratios, and the calls' figures by the number of replicas."""
    service = await Service.of(this_host(), call_timeout_s=TIMEOUT_S, spawn_timeout_s=TIMEOUT_S)
    table, ratios = FigureTable(), {}
    try:
        pool = service.spawn(
            BenchWorker, role="worker", spec=RoleSpec(replicas=1, max_ongoing=ONGOING)
        )
        await pool.settled(TIMEOUT_S)
        bare_mesh = this_host().spawn_procs(per_host={"procs": 1}, name="bare")
        bare = bare_mesh.spawn("bare", BenchWorker).echo.call_one
        direct, routed = await alone_ms(bare), await alone_ms(partial(pool.route, "echo"))
        flat = await rate(bare, ONGOING, seconds)
        print(f"a bare call {direct:.2f} ms, {flat:.0f}/s; routed {routed:.2f} ms")
        ratios["routed call over bare call"] = routed / direct
        for size in SIZES:
            pool.scale(size)
            await pool.settled(TIMEOUT_S)
            trivial, waiting = [
                await rate(partial(pool.route, method), ONGOING * size, seconds)
                for method in ("echo", "waiting")
            ]
            one = table.rows[0] if table.rows else {"trivial": trivial, "waiting": waiting}
            efficiency = waiting / (size * one["waiting"])
            table.add(
                {"replicas": size, "trivial": trivial, "waiting": waiting}
                | {"ideal_waiting": ONGOING * size / WAIT_S, "efficiency": efficiency}
            )
            if size > 1:
                ratios[f"waiting, {size} replicas over {size} x 1"] = efficiency
        await bare_mesh.stop()
        routed_crowd, bare_crowd = await crowded(service, seconds)
        ratios["trivial, 100 in flight over bare calls"] = routed_crowd / bare_crowd
        print(f"with {CROWD} in flight: bare {bare_crowd:.0f}/s, routed {routed_crowd:.0f}/s")
    finally:
        await service.stop()
    first, last = table.rows[0], table.rows[-1]
    ratios["waiting, 8 replicas over ideal"] = last["waiting"] / last["ideal_waiting"]
    ratios["trivial, 8 replicas over 1"] = last["trivial"] / first["trivial"]
    ratios["trivial, 1 replica over bare calls"] = first["trivial"] / flat
    calls = {
        "bare": {"call_ms": direct, "calls_per_second": flat}, "routed": {"call_ms": routed},
        "crowded": {"routed_per_second": routed_crowd, "bare_per_second": bare_crowd},
    }  # fmt: skip
    return ratios, {**calls, "pools": table.rows}


def measure(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    return asyncio.run(run(options.seconds))


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {"--seconds": (3.0, "of each measurement")},
        quick={"seconds": 1.0},
        config={"ongoing": ONGOING, "wait_s": WAIT_S},
    )
