"""What the controller's event loop spends on each thing it does: `benchmarks.simulation` takes it.

    python -m benchmarks.simulation.controller_latency [--most 8] [--out FILE]

Costs on the loop are CPU time of its own thread, so that other work on the cores falls out of them;
round trips, starts and transfers are wall time and take them in. The service's whole watch and its
calls are measured too: the simulation is not made from those, it is held against them (`checks`).
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from monarch.actor import this_host

from benchmarks.pools import BenchWorker
from benchmarks.record import benchmark
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.watch.telemetry.hub import open_sinks
from cartridge_forge.protocols.ports import TraceSpan
from cartridge_forge.protocols.records.status import ReplicaState
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.protocols.spec.services import HealthSpec
from cartridge_forge.services.planes.open import open_plane
from cartridge_forge.services.pool.health import HealthState
from cartridge_forge.services.pool.pool import Pool, Replica, RequestStatus
from cartridge_forge.services.pool.service import Service
from cartridge_forge.services.run_directory import RunDirectory
from cartridge_forge.services.run_log import RunLog

ROUNDS = 60
TURNS = 3  # of the loop, after which every task has sent its messages
SILENT = 3600.0  # seconds between heartbeats, where they must not disturb
WATCHED_SECONDS = 4.0
CHECK_HEARTBEAT = 0.05  # seconds: a tenth of the default, to be measurable on an idle loop
MIB = 1 << 20
Row = dict[str, Any]


class CpuClock:
    """Measure CPU seconds of this thread and of the process, and wall seconds, since its start."""

    def __init__(self) -> None:
        self._then = self._now()

    @property
    def spent(self) -> tuple[float, ...]:
        return tuple(now - then for now, then in zip(self._now(), self._then, strict=True))

    def _now(self) -> tuple[float, float, float]:
        return time.thread_time(), time.process_time(), time.perf_counter()


def per_turn(work: Callable[[], Any], turns: int) -> float:
    """Return the mean seconds on the loop of one call, over `turns` calls."""
    clock = CpuClock()
    for _ in range(turns):
        work()
    return clock.spent[0] / turns


@asynccontextmanager
async def serving(replicas: int, heartbeat_s: float) -> AsyncIterator[tuple[Service, Pool, Row]]:
    """Yield a service with one pool that has settled, and the durations of its start."""
    health = HealthSpec(
        heartbeat_s=heartbeat_s, suspect_after_s=heartbeat_s * 200, dead_after_s=heartbeat_s * 400
    )
    service = await Service.of(this_host(), health=health)
    clock = CpuClock()
    pool = service.spawn(BenchWorker, n=replicas, role="probe")
    await pool.settled(60)
    thread, _, wall = clock.spent
    try:
        yield service, pool, {"processes": replicas, "loop_s": thread, "wall_s": wall}
    finally:
        await service.stop()


async def one_by_one(calls: Sequence[Callable[[], Awaitable[Any]]]) -> dict[str, float]:
    """Return medians over rounds of all calls: seconds per call on the loop, to send it and to
    receive its reply; of the process; and from the first sent to the last received."""
    rows = []
    for _ in range(ROUNDS):
        clock = CpuClock()
        tasks = [asyncio.ensure_future(call()) for call in calls]
        for _ in range(TURNS):
            await asyncio.sleep(0)
        sent = clock.spent[0]
        await asyncio.gather(*tasks)
        thread, process, wall = clock.spent
        rows.append((sent / len(calls), (thread - sent) / len(calls), process / len(calls), wall))
    columns = zip(*rows, strict=True)
    names = ("send_s", "receive_s", "process_s", "wall_s")
    return dict(zip(names, map(statistics.median, columns), strict=True))


async def calls_and_starts(sizes: Sequence[int]) -> dict[str, list[Row]]:
    """Measure starts, bare calls, heartbeats, routed requests and updates: the controller's
    messages alone, and as the service and its pools send them."""
    rows: dict[str, list[Row]] = {"starts": []}
    for replicas in sizes:
        async with serving(replicas, SILENT) as (service, pool, start):
            rows["starts"].append(start)
            pool_replicas = pool.replicas
            kinds: dict[str, list[Callable[[], Awaitable[Any]]]] = {
                "calls": [r.actor.echo.call_one for r in pool_replicas],
                "beats": [partial(service._beat, r, r.process) for r in pool_replicas],
                "routes": [partial(pool.route, "echo") for _ in pool_replicas],
                "updates": [partial(pool._tell, r, "load", (1,)) for r in pool_replicas],
            }
            for name, calls in kinds.items():
                row = {"replicas": replicas, **await one_by_one(calls)}
                rows.setdefault(name, []).append(row)
                print(name, row, flush=True)
    return rows


def healthy_pool(size: int) -> Pool:
    """Return a pool of `size` healthy replicas, without processes."""
    pool = Pool("probe", RoleSpec(replicas=size), 60.0)
    pool.replicas = [
        Replica("probe", i, life=HealthState(ReplicaState.HEALTHY)) for i in range(size)
    ]
    return pool


async def seats(size: int) -> Row:
    """Measure seconds to choose a replica for a request, which looks at every one of the pool."""
    pool, request = healthy_pool(size), RequestStatus("probe/1", "echo", 0.0)
    repeats = max(5, 20_000 // size)
    clock = CpuClock()
    for _ in range(repeats):
        await pool._seat(None, time.monotonic() + 60, request, 60.0, suspect=False)
    return {"replicas": size, "loop_s": clock.spent[0] / repeats}


def looks(size: int) -> Row:
    """Measure seconds of the run's check once a second, and of the pools' states at a heartbeat."""
    pool = healthy_pool(size)
    times = {"status_s": per_turn(pool.status, 20), "settled_s": per_turn(pool.is_settled, 20)}
    return {"replicas": size, **times}


def records() -> dict[str, float]:
    """Measure seconds to write an event, and a span, with a run's default sinks."""
    spec = load_spec("meshes/longhealth.yaml").spec
    with tempfile.TemporaryDirectory() as root:
        directory = RunDirectory.create(Path(root), "probe", "{}")
        recorder = RunLog(directory, open_sinks(spec, directory, lambda sink, message: None))
        facts: Row = {"request": "generator/1", "attempt": 1, "outcome": "ok", "waited": 0.0}
        step = partial(recorder.event, "step", arm="on_policy", step=1, rollouts=8)
        span = partial(recorder.span, TraceSpan("generator[0]", "generate", 0.0, 1.0, facts))
        times = {"event_s": per_turn(step, 2000), "span_s": per_turn(span, 2000)}
        recorder.close()
    return times


async def store() -> list[Row]:
    """Measure TorchStore: seconds of a put, of a get, and of 2 and 4 concurrent gets."""
    storage = this_host().spawn_procs(per_host={"gpus": 1}, name="storage")
    plane = await open_plane("torchstore", storage)
    rows = []
    async with serving(4, SILENT) as (_, pool, _):
        for size in (1024, MIB, 16 * MIB, 64 * MIB):
            source = {"x": torch.ones(size, dtype=torch.uint8)}
            laps = []
            for repeat in range(4):
                clock = CpuClock()
                packet = await plane.put(f"probe/{size}/{repeat}", source)
                lap = {"put_s": clock.spent[2]}
                for readers in (1, 2, 4):
                    clock = CpuClock()
                    readers_used = pool.replicas[:readers]
                    await asyncio.gather(
                        *(r.actor.pull.call_one(plane, packet) for r in readers_used)
                    )
                    lap[f"get_{readers}_s"] = clock.spent[2]
                await plane.delete(packet.key)
                laps.append(lap)
            # The first round also opens connections.
            medians = {name: statistics.median(lap[name] for lap in laps[1:]) for name in laps[0]}
            rows.append({"bytes": size, **medians})
            print(rows[-1], flush=True)
    await plane.stop()
    await storage.stop()
    return rows


async def checks(replicas: int) -> Row:
    """Measure a real service, to check the simulation: the share of its loop's time that the health
    checks take, and seconds of a step's requests and of an update."""
    async with serving(replicas, CHECK_HEARTBEAT) as (_, pool, _):
        clock = CpuClock()
        await asyncio.sleep(WATCHED_SECONDS)
        thread, process, wall = clock.spent
        split, update = [], []
        for version in range(30):
            clock = CpuClock()
            await pool.split(list(range(replicas)), partial(pool.route, "echo"))
            split.append(clock.spent[2])
            clock = CpuClock()
            await pool.update("cartridge", version, "load", version)
            update.append(clock.spent[2])
    row: Row = {"replicas": replicas, "heartbeat_s": CHECK_HEARTBEAT}
    row |= {"loop_share": thread / wall, "process_share": process / wall}
    row |= {"split_s": statistics.median(split), "update_s": statistics.median(update)}
    print(row, flush=True)
    return row


async def idle() -> float:
    """Return seconds on the loop of one heartbeat of a service without replicas."""
    service = await Service.of(this_host(), health=HealthSpec(heartbeat_s=CHECK_HEARTBEAT))
    clock = CpuClock()
    await asyncio.sleep(WATCHED_SECONDS)
    thread, _, wall = clock.spent
    await service.stop()
    return thread * CHECK_HEARTBEAT / wall


async def measured(most: int) -> Row:
    torch.set_num_threads(1)
    sizes = [1 << i for i in range(most.bit_length())]
    return {
        "unit": "seconds, medians",
        "seats": [await seats(size) for size in (8, 64, 512, 4096)],
        "looks": [looks(size) for size in (64, 512, 4096)],
        "records": records(),
        **await calls_and_starts(sizes),
        "idle_s": await idle(),
        "store": await store(),
        "checks": [await checks(size) for size in sizes],
    }


if __name__ == "__main__":
    benchmark(
        __doc__,
        lambda options: ({}, asyncio.run(measured(options.most))),
        {
            "--most": {"type": int, "default": 8, "choices": (1, 2, 4, 8, 16, 32)},
        },
    )
