"""Two hosts, their links cut and restored under load; prints what happened as one JSON object. With
the word `starts`: hosts that are cut off for good while processes start there, and what is left.

Runs in a network namespace of its own (tests/mesh/services/pool/test_lifecycle.py and
tests/nightly/plugins/cluster/hosts/test_cut_starts.py judge).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import monarch.actor
from monarch.actor import Actor, concurrent_endpoint
from namespaces import CLIENT, Hosts

from cartridge_forge.plugins.cluster.hosts.membership import attach
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.records.status import ReplicaState
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.protocols.spec.services import HealthSpec
from cartridge_forge.services.pool.pool import Pool
from cartridge_forge.services.pool.service import Service
from cartridge_forge.services.proc_info import has_ended

HEALTH = HealthSpec(heartbeat_s=0.2, suspect_after_s=1.0, dead_after_s=3.0)
REPLICAS = 4
CALLERS = 6
WORK_SECONDS = 0.05
PATIENCE = 240.0  # seconds; a busy machine is slow to notice and to end processes
NOBODY = "10.77.0.99"
MOMENTS_S = (0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.3, 1.6)  # after a spawn, one of each host
GIVEN_UP_S = 8.0
STARTS_PATIENCE = 400.0


class WorkActor(Actor):
    @concurrent_endpoint
    async def ready(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def work(self, number: int) -> tuple[int, int]:
        """The number back, and whose process it was."""
        await asyncio.sleep(WORK_SECONDS)
        return number, os.getpid()


class Traffic:
    """Callers that ask without pause. `answers` maps each request to who answered it."""

    def __init__(self, pool: Pool) -> None:
        self.asked = 0
        self.answers: dict[int, list[int]] = {}
        self.errors: list[str] = []
        self._pool = pool
        self._going = True
        self._callers = [asyncio.create_task(self._call()) for _ in range(CALLERS)]

    async def end(self) -> None:
        self._going = False
        await asyncio.gather(*self._callers)

    async def _call(self) -> None:
        while self._going:
            self.asked += 1
            number = self.asked
            try:
                answer, pid = await self._pool.route("work", number)
                self.answers.setdefault(answer, []).append(pid)
            except Exception as error:
                self.errors.append(repr(error))


class Observer:
    """Looks at a pool, and says how long it took until something was so."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def hosts(self) -> dict[str, int]:
        """How many replicas are HEALTHY on each host."""
        well = [r for r in self.pool.replicas if r.state is ReplicaState.HEALTHY and r.process]
        return dict(Counter(r.process.host for r in well if r.process))

    def states(self, host: str) -> list[str]:
        return [str(r.state) for r in self.pool.replicas if r.process and r.process.host == host]

    def pids(self, host: str) -> list[int]:
        return [r.process.pid for r in self.pool.replicas if r.process and r.process.host == host]

    async def until(self, so: Callable[[], bool]) -> float:
        """Seconds that passed."""
        begun = time.monotonic()
        while not so():
            if time.monotonic() - begun > PATIENCE:
                raise TimeoutError(f"not within {PATIENCE:g} s: {self.pool.status()}")
            await asyncio.sleep(0.02)
        return round(time.monotonic() - begun, 2)

    async def lose(self, host: str, other: str) -> dict[str, Any]:
        """A host is being lost: what becomes of its replicas, and of the pool."""
        begun = time.monotonic()

        def since() -> float:
            return round(time.monotonic() - begun, 2)

        had = self.pids(host)
        report: dict[str, Any] = {"had": had}
        await self.until(lambda: "suspect" in self.states(host))
        report["suspect_s"] = since()
        await self.until(lambda: not set(had) & set(self.pids(host)))
        report["dead_s"] = since()
        await self.until(lambda: self.hosts() == {other: REPLICAS})
        report["elsewhere_s"] = since()
        return report

    async def heal(self, host: str, other: str) -> dict[str, Any]:
        begun = time.monotonic()
        await self.until(lambda: host in self.hosts())
        first = round(time.monotonic() - begun, 2)
        half = REPLICAS // 2
        await self.until(
            lambda: self.pool.is_settled() and self.hosts() == {host: half, other: half}
        )
        return {"first_s": first, "balanced_s": round(time.monotonic() - begun, 2)}


def listing(pids: list[int]) -> str:
    """The parents, ages, states and commands of processes."""
    words = ["ps", "-o", "pid,ppid,etimes,stat,args", "-p", ",".join(map(str, pids))]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


async def scenario(hosts: Hosts) -> dict[str, Any]:
    report: dict[str, Any] = {"events": []}
    monarch.actor.enable_transport(f"tcp://{CLIENT}:0")
    try:
        await attach(f"tcp://{NOBODY}:26600", timeout_s=1.0)
    except RunError as error:
        report["nobody"] = str(error)
    service = await Service.of(
        await asyncio.gather(*map(attach, hosts.addresses)),
        health=HEALTH,
        call_timeout_s=30.0,
        spawn_timeout_s=60.0,
        spares=2,
        local=False,
        note=lambda event, **facts: report["events"].append({"event": event, **facts}),
    )
    pool = service.spawn(WorkActor, spec=RoleSpec(replicas=REPLICAS, restarts=20))
    await service.ready()
    service.keep_spares()
    see, traffic = Observer(pool), Traffic(pool)
    report["start"] = see.hosts()

    async def answered(seconds: float) -> list[int]:
        """Whose answers came in that time."""
        before = set(traffic.answers)
        await asyncio.sleep(seconds)
        return sorted({traffic.answers[n][0] for n in set(traffic.answers) - before})

    # A link that is back before its replicas are given up: they go on.
    before = see.pids("host0")
    hosts.cut(0)
    report["blip_suspect_s"] = await see.until(lambda: see.states("host0") == ["suspect"] * 2)
    hosts.restore(0)
    report["blip_healed_s"] = await see.until(lambda: see.hosts() == {"host0": 2, "host1": 2})
    report["blip_same"] = before == see.pids("host0")

    hosts.cut(0)
    report["lost"] = await see.lose("host0", "host1")
    report["lost"]["served_by"] = await answered(2.0)
    report["lost"]["host1"] = see.pids("host1")
    hosts.restore(0)
    report["healed"] = await see.heal("host0", "host1")
    report["healed"]["served_by"] = await answered(1.0)
    report["healed"]["pids"] = sorted(see.pids("host0") + see.pids("host1"))
    given_up = report["lost"]["had"]
    report["healed"]["given_up_end_s"] = await see.until(lambda: all(map(has_ended, given_up)))

    hosts.mute(1)  # it hears, and nobody hears it
    report["muted"] = await see.lose("host1", "host0")
    hosts.unmute(1)
    report["unmuted"] = await see.heal("host1", "host0")

    for host in (0, 1):
        hosts.cut(host)
    report["all_dead_s"] = await see.until(lambda: pool.restarts == 8)
    hosts.restore(1)
    report["one_back_s"] = await see.until(lambda: see.hosts() == {"host1": REPLICAS})
    hosts.restore(0)
    report["both_back"] = await see.heal("host0", "host1")

    hosts.cut(1)
    await see.until(lambda: pool.restarts == 10)  # also where no request waited there
    await traffic.end()
    report["traffic"] = {
        "asked": traffic.asked,
        "answered_once": sum(len(pids) == 1 for pids in traffic.answers.values()),
        "errors": traffic.errors,
    }
    report["status"] = {
        "requests": pool.requests, "failures": pool.failures, "retries": pool.retries,
        "restarts": pool.restarts,
    }  # fmt: skip
    begun = time.monotonic()
    await service.stop()
    report["stop_s"] = round(time.monotonic() - begun, 2)
    try:
        report["last_end_s"] = await see.until(lambda: not hosts.processes())
    except TimeoutError as error:
        raise TimeoutError(listing(hosts.processes())) from error
    return report


def left_at_last(hosts: Hosts) -> str:
    """The processes on the hosts that have not ended within STARTS_PATIENCE, "" for none."""
    begun = time.monotonic()
    while (left := hosts.processes()) and time.monotonic() - begun < STARTS_PATIENCE:
        time.sleep(1.0)
    return listing(left) if left else ""


async def cut_starts(hosts: Hosts) -> dict[str, Any]:
    monarch.actor.enable_transport(f"tcp://{CLIENT}:0")
    meshes = await asyncio.gather(*map(attach, hosts.addresses))
    for host, (mesh, moment) in enumerate(zip(meshes, MOMENTS_S, strict=True)):
        service = await Service.of(
            [mesh], health=HEALTH, call_timeout_s=30.0, spawn_timeout_s=60.0, spares=1, local=False,
            note=lambda event, **facts: None,
        )  # fmt: skip
        service.spawn(WorkActor, spec=RoleSpec(replicas=2, restarts=20))
        await asyncio.sleep(moment)
        hosts.cut(host)
        await asyncio.sleep(GIVEN_UP_S)
        await service.stop()
    return {"left": await asyncio.to_thread(left_at_last, hosts)}


if __name__ == "__main__":
    told, count = (cut_starts, len(MOMENTS_S)) if "starts" in sys.argv else (scenario, 2)
    with Hosts(count) as hosts:
        sys.stdout.write(json.dumps(asyncio.run(told(hosts))) + "\n")
        sys.stdout.flush()
    os._exit(0)  # the root client's own shutdown would wait for the hosts that are cut off
