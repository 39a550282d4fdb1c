"""What the controller's event loop spends on each thing it does: controller_simulation takes it.

    python -m benchmarks.controller_latency [--most 8] [--out benchmarks/controller_latency.json]

Costs on the loop are CPU time of its own thread, so that other work on the cores falls out of them;
round trips, starts and transfers are wall time and take them in. The service's whole watch and its
calls are measured too: the simulation is not made from those, it is held against them (`checks`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, concurrent_endpoint, this_host

from benchmarks.record import provenance

if TYPE_CHECKING:
    from services.pool.pool import Pool
    from services.pool.service import Service

ROUNDS = 60
TURNS = 3  # of the loop, after which every task has sent its messages
SILENT = 3600.0  # seconds between heartbeats, where they must not disturb
WATCHED_SECONDS = 4.0
CHECK_HEARTBEAT = 0.05  # seconds: a tenth of the default, to be measurable on an idle loop
MIB = 1 << 20


class LatencyProbe(Actor):
    """Reply at once; `pull` gets a tensor and reads it once."""

    @concurrent_endpoint
    async def ready(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def echo(self, items: Any = None) -> Any:
        return items

    @concurrent_endpoint
    async def load(self, version: int) -> int:
        return version

    @concurrent_endpoint
    async def pull(self, plane: Any, packet: Any) -> float:
        begun = time.perf_counter()
        tensors = await plane.get(packet)
        tensors["x"].sum()
        return time.perf_counter() - begun


class CpuClock:
    """Measure CPU seconds of this thread and of the process, and wall seconds, since its start."""

    def __init__(self) -> None:
        self._then = time.thread_time(), time.process_time(), time.perf_counter()

    @property
    def spent(self) -> tuple[float, float, float]:
        thread, process, wall = self._then
        return (
            time.thread_time() - thread,
            time.process_time() - process,
            time.perf_counter() - wall,
        )


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`."""
    return [1 << i for i in range(most.bit_length())]


def per_turn(work: Callable[[], Any], turns: int) -> float:
    """Return the mean seconds on the loop of one call, over `turns` calls."""
    clock = CpuClock()
    for _ in range(turns):
        work()
    return clock.spent[0] / turns


async def service_of(replicas: int, heartbeat_s: float) -> tuple[Service, Pool, dict[str, float]]:
    """Return a service with one pool that has settled, and the durations of its start."""
    from protocols.spec.services import HealthSpec
    from services.pool.service import Service

    health = HealthSpec(
        heartbeat_s=heartbeat_s, suspect_after_s=heartbeat_s * 200, dead_after_s=heartbeat_s * 400
    )
    service = await Service.of(this_host(), health=health)
    clock = CpuClock()
    pool = service.spawn(LatencyProbe, n=replicas, role="probe")
    await pool.settled(60)
    thread, _, wall = clock.spent
    return service, pool, {"processes": replicas, "loop_s": thread, "wall_s": wall}


async def one_by_one(calls: list[Callable[[], Awaitable[Any]]]) -> dict[str, float]:
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
    send, receive, process, wall = (statistics.median(column) for column in zip(*rows, strict=True))
    return {"send_s": send, "receive_s": receive, "process_s": process, "wall_s": wall}


async def calls_and_starts(most: int) -> dict[str, list[dict[str, Any]]]:
    """Measure starts, bare calls, heartbeats, routed requests and updates, over 1, 2, 4, ...
    replicas: the controller's messages alone, and as the service and its pools send them."""
    names = ("starts", "calls", "beats", "routes", "updates")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for replicas in powers_of_two(most):
        service, pool, start = await service_of(replicas, SILENT)
        found["starts"].append(start)
        there = pool.replicas
        kinds: dict[str, list[Callable[[], Awaitable[Any]]]] = {
            "calls": [r.actor.echo.call_one for r in there],
            "beats": [partial(service._hear, r, r.process) for r in there],
            "routes": [partial(pool.route, "echo") for _ in there],
            "updates": [partial(pool._tell, r, "load", (1,)) for r in there],
        }
        for name, calls in kinds.items():
            found[name].append({"replicas": replicas, **await one_by_one(calls)})
            print(name, found[name][-1], flush=True)
        await service.stop()
    return found


def healthy_pool(size: int) -> Pool:
    """Return a pool of `size` healthy replicas, without processes."""
    from protocols.records.status import ReplicaState
    from protocols.spec.mesh import RoleSpec
    from services.pool.health import HealthState
    from services.pool.pool import Pool
    from services.pool.replica import Replica

    pool = Pool("probe", RoleSpec(replicas=size), 60.0)
    pool.replicas = [
        Replica("probe", i, life=HealthState(ReplicaState.HEALTHY)) for i in range(size)
    ]
    return pool


async def seats() -> list[dict[str, Any]]:
    """Measure seconds to choose a replica for a request, which looks at every one of the pool."""
    from services.pool.pool import RequestStatus

    rows = []
    for size in (8, 64, 512, 4096):
        pool, request = healthy_pool(size), RequestStatus("probe/1", "echo", 0.0)
        repeats = max(5, 20_000 // size)
        clock = CpuClock()
        for _ in range(repeats):
            await pool._seat(None, time.monotonic() + 60, request, 60.0)
        rows.append({"replicas": size, "loop_s": clock.spent[0] / repeats})
    return rows


async def looks() -> list[dict[str, Any]]:
    """Measure seconds of the run's check once a second, and of the pools' states at a heartbeat."""
    rows = []
    for size in (64, 512, 4096):
        pool = healthy_pool(size)
        times = {"status_s": per_turn(pool.status, 20), "settled_s": per_turn(pool.is_settled, 20)}
        rows.append({"replicas": size, **times})
    return rows


def records() -> dict[str, float]:
    """Measure seconds to write an event, and a span, with a run's default sinks."""
    from protocols.spec.loading import load_spec
    from protocols.types import TraceSpan
    from services.run_directory import RunDirectory
    from services.telemetry.hub import open_sinks
    from services.telemetry.recorder import RunLog

    spec = load_spec("meshes/longhealth.yaml").spec
    with tempfile.TemporaryDirectory() as root:
        directory = RunDirectory.create(Path(root), "probe", "{}")
        recorder = RunLog(directory, open_sinks(spec, directory, lambda sink, message: None))
        facts: dict[str, Any] = {
            "request": "generator/1",
            "attempt": 1,
            "outcome": "ok",
            "waited": 0.0,
        }
        step = partial(recorder.event, "step", arm="on_policy", step=1, rollouts=8)
        span = partial(recorder.span, TraceSpan("generator[0]", "generate", 0.0, 1.0, facts))
        times = {"event_s": per_turn(step, 2000), "span_s": per_turn(span, 2000)}
        recorder.close()
    return times


async def store(most_mib: int = 64) -> list[dict[str, Any]]:
    """Measure TorchStore: seconds of a put, of a get, and of 2 and 4 concurrent gets."""
    import torch

    from services.planes.open import open_plane

    service, pool, _ = await service_of(4, SILENT)
    storage = this_host().spawn_procs(per_host={"gpus": 1}, name="storage")
    plane = await open_plane("torchstore", storage)
    rows = []
    for size in (1024, MIB, 16 * MIB, most_mib * MIB):
        source = {"x": torch.ones(size, dtype=torch.uint8)}
        row: dict[str, Any] = {"bytes": size}
        times: dict[str, list[float]] = {"put_s": [], "get_1_s": [], "get_2_s": [], "get_4_s": []}
        for repeat in range(4):
            clock = CpuClock()
            packet = await plane.put(f"probe/{size}/{repeat}", source)
            times["put_s"].append(clock.spent[2])
            for readers in (1, 2, 4):
                clock = CpuClock()
                reading = [r.actor.pull.call_one(plane, packet) for r in pool.replicas[:readers]]
                await asyncio.gather(*reading)
                times[f"get_{readers}_s"].append(clock.spent[2])
            await plane.delete(packet.key)
        # The first round also opens connections.
        rows.append(row | {name: statistics.median(value[1:]) for name, value in times.items()})
        print(rows[-1], flush=True)
    await plane.stop()
    await storage.stop()
    await service.stop()
    return rows


async def idle() -> float:
    """Return seconds on the loop of one heartbeat of a service without replicas."""
    from protocols.spec.services import HealthSpec
    from services.pool.service import Service

    service = await Service.of(this_host(), health=HealthSpec(heartbeat_s=CHECK_HEARTBEAT))
    clock = CpuClock()
    await asyncio.sleep(WATCHED_SECONDS)
    thread, _, wall = clock.spent
    await service.stop()
    return thread * CHECK_HEARTBEAT / wall


async def checks(most: int) -> list[dict[str, Any]]:
    """Measure a real service, to check the simulation: the share of its loop's time that the health
    checks take, and seconds of a step's requests and of an update."""
    rows = []
    for replicas in powers_of_two(most):
        service, pool, _ = await service_of(replicas, CHECK_HEARTBEAT)
        clock = CpuClock()
        await asyncio.sleep(WATCHED_SECONDS)
        thread, process, wall = clock.spent
        row: dict[str, Any] = {
            "replicas": replicas,
            "heartbeat_s": CHECK_HEARTBEAT,
            "loop_share": thread / wall,
            "process_share": process / wall,
        }
        split, update = [], []
        for version in range(30):
            clock = CpuClock()
            await pool.split(list(range(replicas)), partial(pool.route, "echo"))
            split.append(clock.spent[2])
            clock = CpuClock()
            await pool.update("cartridge", version, "load", version)
            update.append(clock.spent[2])
        row |= {"split_s": statistics.median(split), "update_s": statistics.median(update)}
        rows.append(row)
        print(row, flush=True)
        await service.stop()
    return rows


async def measured(most: int) -> dict[str, Any]:
    alone = {"seats": await seats(), "looks": await looks(), "records": records()}
    print(alone, flush=True)
    return {
        **alone,
        **await calls_and_starts(most),
        "idle_s": await idle(),
        "store": await store(),
        "checks": await checks(most),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=8, choices=(1, 2, 4, 8, 16, 32))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/controller_latency.json"))
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    told = provenance("controller_latency", {"most": arguments.most})
    device = "{name}, {cores} cores, load {load}".format(**told["device"])
    figures = asyncio.run(measured(arguments.most))
    whole = {**told, "device": device, "unit": "seconds, medians", **figures}
    text = json.dumps(whole, indent=1)
    arguments.out.write_text(text + "\n")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
