"""A service over forked processes, with Monarch's own polling too slow to see anything.

    forks_scenario.py deaths    kill replicas and the fork server; print what came of it as JSON
    forks_scenario.py wait      print the ids of all processes as JSON, and wait to be killed

`tests/mesh/forge_run/forkserver/test_forkserver.py` starts it, and judges.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

os.environ["HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY"] = "600s"

from monarch.actor import Actor, MeshFailure, concurrent_endpoint, shutdown_context, this_host

from cartridge_forge.forge_run.forkserver.client import fork_server
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.protocols.spec.services import HealthSpec
from cartridge_forge.services.pool.pool import Pool
from cartridge_forge.services.pool.service import Service
from cartridge_forge.services.proc_info import descendants

PATIENCE = 90.0
# Silence is judged much later than this waits.
HEALTH = HealthSpec(heartbeat_s=100.0, suspect_after_s=200.0, dead_after_s=400.0)


class SelfReport(Actor):
    @concurrent_endpoint
    async def ready(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def tell(self) -> dict[str, Any]:
        """Who started this process, what it had imported before this class, and its threads."""
        import torch

        return {
            "pid": os.getpid(), "parent": os.getppid(),
            "transformers": "transformers" in sys.modules, "threads": torch.get_num_threads(),
        }  # fmt: skip


class Notes:
    """What a service notes, and reports of Monarch's supervision."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.reports = 0
        self.changed = asyncio.Event()

    def note(self, event: str, **facts: Any) -> None:
        if event == "replica_lost":
            self.lost.append(facts["reason"])
            self.changed.set()


def say(told: Any) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


async def replaced(pool: Pool, notes: Notes, kill: int) -> dict[str, Any]:
    """Kill a process and return the facts of the replica's successor."""
    notes.changed.clear()
    os.kill(kill, signal.SIGKILL)
    await asyncio.wait_for(notes.changed.wait(), PATIENCE)
    await pool.settled(PATIENCE)
    facts: dict[str, Any] = await pool.route("tell")
    return facts


async def scenario(wait: bool) -> None:
    notes = Notes()
    service = await Service.of(this_host(), health=HEALTH, note=notes.note)
    noticed = service.noticed

    def count(failure: MeshFailure) -> bool:
        notes.reports += 1
        return noticed(failure)

    import monarch.actor

    monarch.actor.unhandled_fault_hook = count
    pool = service.spawn(SelfReport, spec=RoleSpec(threads=2, restarts=5))
    await service.ready()
    first = await pool.route("tell")
    if wait:
        say(sorted(descendants(os.getpid())))
        await asyncio.sleep(1000)
    second = await replaced(pool, notes, first["pid"])
    third = await replaced(pool, notes, first["parent"])  # the fork server, and all with it
    told = {"processes": [first, second, third], "lost": notes.lost, "reports": notes.reports}
    await service.stop()
    say(told)


if __name__ == "__main__":
    with fork_server() as ready:
        ready()
        asyncio.run(scenario(sys.argv[1] == "wait"))
        shutdown_context().get(timeout=30)
