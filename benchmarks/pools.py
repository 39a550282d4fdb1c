"""Calls per second through a pool of 1 to 8 replicas, of actors that answer at once and that wait.

    python -m benchmarks.pools [--seconds 3] [--quick]

    trivial    answers at once: what routing itself can carry; all replicas share this client
    waiting    waits 50 ms as one that asks a network does: ideal is 20 calls/s for each call that a
               replica has in hand
    bare       the trivial actor called without a pool, for what routing adds

A closed loop keeps `max_ongoing` calls of every replica in flight. Efficiency is the rate of n
replicas over n times the rate of one.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from monarch.actor import Actor, concurrent_endpoint, this_host

from benchmarks.record import arguments, provenance, write
from protocols.spec.mesh import RoleSpec
from services.pool.service import Service

WAIT_S = 0.05
SIZES = (1, 2, 4, 8)
ONGOING = 4  # concurrent calls of one replica
TIMEOUT_S = 120.0


async def rate(ask: Callable[[], Awaitable[Any]], together: int, seconds: float) -> float:
    """Return calls per second with `together` of them always in flight."""
    done = 0
    end = time.perf_counter() + seconds

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await ask()
            done += 1

    await asyncio.gather(*(ask() for _ in range(together)))  # opens connections
    begun = time.perf_counter()
    end = begun + seconds
    await asyncio.gather(*(caller() for _ in range(together)))
    return done / (time.perf_counter() - begun)


async def alone(ask: Callable[[], Awaitable[Any]], calls: int) -> float:
    """Return the median seconds of a call, made in sequence."""
    laps = []
    for _ in range(calls):
        begun = time.perf_counter()
        await ask()
        laps.append(time.perf_counter() - begun)
    return statistics.median(laps)


class PoolWorker(Actor):
    @concurrent_endpoint
    async def ready(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def trivial(self) -> None:
        return None

    @concurrent_endpoint
    async def waiting(self) -> None:
        await asyncio.sleep(WAIT_S)


async def run(sizes: tuple[int, ...], seconds: float) -> dict[str, Any]:
    service = await Service.of(this_host(), call_timeout_s=TIMEOUT_S, spawn_timeout_s=TIMEOUT_S)
    try:
        pool = service.spawn(
            PoolWorker, role="worker", spec=RoleSpec(replicas=sizes[0], max_ongoing=ONGOING)
        )
        await pool.settled(TIMEOUT_S)
        bare_mesh = this_host().spawn_procs(per_host={"procs": 1}, name="bare")
        bare = bare_mesh.spawn("bare", PoolWorker)
        calls = 500
        direct = await alone(bare.trivial.call_one, calls)
        routed = await alone(partial(pool.route, "trivial"), calls)
        flat = await rate(bare.trivial.call_one, ONGOING, seconds)
        found: dict[str, Any] = {
            "bare": {"call_ms": 1e3 * direct, "calls_per_second": flat},
            "routed": {"call_ms": 1e3 * routed},
            "pools": [],
        }
        print(f"a bare call {1e3 * direct:.2f} ms, {flat:.0f}/s; routed {1e3 * routed:.2f} ms")
        for size in sizes:
            pool.scale(size)
            await pool.settled(TIMEOUT_S)
            row: dict[str, float] = {"replicas": size}
            for method in ("trivial", "waiting"):
                row[method] = await rate(partial(pool.route, method), ONGOING * size, seconds)
            row["ideal_waiting"] = ONGOING * size / WAIT_S
            found["pools"].append(row)
            first = found["pools"][0]
            print(
                f"{size} replicas: trivial {row['trivial']:.0f}/s, waiting {row['waiting']:.0f}/s "
                f"(efficiency {row['waiting'] / (size * first['waiting'] / sizes[0]):.2f})",
                flush=True,
            )
        await bare_mesh.stop()
    finally:
        await service.stop()
    return found


def main() -> None:
    parser = arguments(__doc__, "pools")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    options = parser.parse_args()
    seconds = min(options.seconds, 1.0) if options.quick else options.seconds
    told = provenance("pools", vars(options) | {"ongoing": ONGOING, "wait_s": WAIT_S})
    found = asyncio.run(run(SIZES, seconds))
    rates = {row["replicas"]: row for row in found["pools"]}
    ratios = {"routed call over bare call": found["routed"]["call_ms"] / found["bare"]["call_ms"]}
    for size in SIZES[1:]:
        ratios[f"waiting, {size} replicas over {size} x 1"] = rates[size]["waiting"] / (
            size * rates[1]["waiting"]
        )
    ratios["waiting, 8 replicas over ideal"] = rates[8]["waiting"] / rates[8]["ideal_waiting"]
    ratios["trivial, 8 replicas over 1"] = rates[8]["trivial"] / rates[1]["trivial"]
    ratios["trivial, 1 replica over bare calls"] = (
        rates[1]["trivial"] / found["bare"]["calls_per_second"]
    )
    write(options.out, told, ratios, found)


if __name__ == "__main__":
    main()
