"""Heartbeats of two hosts with four processes each: how many messages they are, and what is found
by them; prints one JSON object.

Runs in a network namespace of its own; tests/nightly/plugins/cluster/hosts/test_heartbeats.py
judges.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import monarch.actor
from hosts_scenario import WorkActor
from namespaces import CLIENT, Hosts

from cartridge_forge.plugins.cluster.hosts.host_heartbeats import (
    HeartbeatPlan,
    HostAsk,
    HostHeartbeats,
)
from cartridge_forge.plugins.cluster.hosts.membership import attach
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.protocols.spec.services import HealthSpec
from cartridge_forge.services.pool.process import ReplicaProcess
from cartridge_forge.services.pool.service import Service

# Silence is the end only after 20 s, with the reason that it was silent.
HEALTH = HealthSpec(heartbeat_s=0.5, suspect_after_s=4.0, dead_after_s=20.0)
EACH, PERIODS = 4, 10
PATIENCE = 120.0


class Count:
    """How many messages each host gets, in which periods."""

    def __init__(self) -> None:
        self.sent: list[tuple[HostHeartbeats, int]] = []
        send, count = HostHeartbeats.send, self.sent

        def counted(
            self: HostHeartbeats, watched: Sequence[ReplicaProcess]
        ) -> list[Coroutine[Any, Any, None]]:
            works = send(self, watched)
            count.append((self, len(works)))
            return works

        HostHeartbeats.send = counted  # type: ignore[method-assign]

    def newest(self) -> list[int]:
        """The messages of the newest period."""
        return [count for _, count in self.sent[-2:]]

    async def periods(self) -> dict[str, Any]:
        """The messages of each host in each of so many periods, and what crossed the links."""
        self.sent.clear()
        before = link_bytes()
        await until(lambda: len(self.sent) >= 2 * PERIODS, "so many periods")
        crossed = link_bytes() - before
        messages = sorted({count for _, count in self.sent})
        return {"messages": messages, "kb_a_period": round(crossed / PERIODS / 1000, 1)}


def link_bytes() -> int:
    """What has crossed the links of both hosts, in both directions."""
    total = 0
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.strip().partition(":")
        if name in ("host0", "host1"):
            total += int(counts.split()[0]) + int(counts.split()[8])
    return total


async def until(so: Callable[[], bool], what: str) -> None:
    begun = time.monotonic()
    while not so():
        if time.monotonic() - begun > PATIENCE:
            raise TimeoutError(f"{what}: not within {PATIENCE:g} s")
        await asyncio.sleep(0.02)


async def scenario(hosts: Hosts) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    report: dict[str, Any] = {"events": events}
    monarch.actor.enable_transport(f"tcp://{CLIENT}:0")
    service = await Service.of(
        await asyncio.gather(*map(attach, hosts.addresses)),
        health=HEALTH,
        local=False,
        note=lambda event, **facts: events.append({"event": event, **facts}),
    )
    count = Count()
    pool = service.spawn(WorkActor, spec=RoleSpec(replicas=2 * EACH, restarts=20))
    await service.ready()

    def there(host: str) -> list[ReplicaProcess]:
        return [r.process for r in pool.replicas if r.process and r.process.host == host]

    def states() -> list[str]:
        return [str(r.state) for r in pool.replicas]

    def lost() -> list[str]:
        return [event["reason"] for event in events if event["event"] == "replica_lost"]

    async def spoken_for() -> None:
        hosts = service._processes._heartbeats.values()
        await until(lambda: all(h._plan.speaker for h in hosts), "each host has a speaker")
        await until(lambda: count.newest() == [1, 1], "one message a host")

    report["processes"] = [len(there("host0")), len(there("host1"))]
    await spoken_for()
    report["batched"] = await count.periods()
    ask = HeartbeatPlan.ask
    HeartbeatPlan.ask = lambda _, watched, now: HostAsk(single=tuple(watched))  # type: ignore[method-assign]
    report["single"] = await count.periods()
    HeartbeatPlan.ask = ask  # type: ignore[method-assign]
    await spoken_for()

    # One that hangs is found as before, and its host's others stay healthy.
    hung = there("host0")[-1].pid
    os.kill(hung, signal.SIGSTOP)
    await until(lambda: "suspect" in states(), "a stopped process is suspect")
    report["hung"] = {"suspect": states().count("suspect"), **(await count.periods())}
    os.kill(hung, signal.SIGCONT)
    await until(lambda: states() == ["healthy"] * 2 * EACH, "it goes on")
    report["hung"]["lost"] = list(lost())

    # One that is killed is told of.
    killed = there("host1")[-1].pid
    os.kill(killed, signal.SIGKILL)
    await until(lambda: bool(lost()), "it is found")
    await until(pool.is_settled, "it is replaced")
    report["killed"] = {"pid": killed, "lost": list(lost())}

    # With the speaker nobody is lost.
    speaker = next(iter(service._processes._heartbeats.values()))._process
    assert speaker is not None
    os.kill(speaker.pid, signal.SIGKILL)
    await until(lambda: max(count.newest()) > 1, "processes are asked one by one")
    # For as long as a dead speaker is waited for and another is started.
    await until(lambda: count.newest() == [1, 1], "another speaks")
    report["after"] = {"lost": list(lost()), **(await count.periods())}
    await service.stop()
    return report


if __name__ == "__main__":
    with Hosts(2) as hosts:
        sys.stdout.write(json.dumps(asyncio.run(scenario(hosts))) + "\n")
        sys.stdout.flush()
    os._exit(0)
