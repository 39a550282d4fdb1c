"""A Slurm job of two nodes until it is cancelled or preempted; prints what happened as JSON.

`tests/mesh/services/hosts/test_slurm.py` starts it, in a directory of its own, and judges.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import monarch.actor
from fake_slurm import Cluster, alive
from monarch.actor import Actor, MeshFailure, concurrent_endpoint
from monarch.config import get_global_config

from protocols.errors import HostsEndedError
from protocols.spec.mesh import RunSpec
from services.hosts import slurm as slurm_hosts
from services.hosts.slurm import SlurmHosts
from services.pool.service import Service

TRANSPORT = "tcp://127.0.0.1:0"
PATIENCE = 120.0


class WhoActor(Actor):
    @concurrent_endpoint
    async def ready(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def who(self) -> tuple[str, str | None]:
        """The Slurm job of this process, and how patient its Monarch is."""
        patience = os.environ.get("HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT")
        return os.environ["SLURM_JOB_ID"], patience


class HeadActor(Actor):
    """Whoever drives a run is an actor itself, as the controller is, and handles its deaths."""

    def __init__(self) -> None:
        self._service: Service | None = None

    def __supervise__(self, failure: MeshFailure) -> bool:
        return self._service is None or self._service.noticed(failure)

    @concurrent_endpoint
    async def run(self, spec: RunSpec, slurm: Cluster, preempted: bool) -> dict[str, Any]:
        slurm_hosts.WATCH_SECONDS = 0.2
        transports = [str(get_global_config()["default_transport"])]
        told: dict[str, Any] = {"transports": transports, "joined": [], "jobs": 0}

        def note(event: str, **facts: Any) -> None:
            if event == "host_joined":
                told["joined"].append([facts["host"], facts["role"]])

        service = self._service = await Service.of(SlurmHosts(spec), local=False, note=note)
        transports.append(str(get_global_config()["default_transport"]))
        pool = service.spawn(WhoActor, n=4, role="who")
        await pool.settled(PATIENCE)
        told["hosts"] = sorted(r.process.host for r in pool.replicas if r.process)
        told["who"] = await pool.route("who")
        if preempted:  # while nothing is asked of the replicas, as in a run that is paused
            slurm.preempt()
            try:
                await asyncio.wait_for(asyncio.shield(service.failure), PATIENCE)
            except HostsEndedError as error:
                told["end"] = str(error)
        await service.stop()
        told["jobs"] = slurm.facts["jobs"]
        return told


def main(directory: Path, spec: RunSpec, preempted: bool) -> None:
    slurm = Cluster(directory)
    monarch.actor.enable_transport(TRANSPORT)
    procs = monarch.actor.this_host().spawn_procs(per_host={"procs": 1}, name="head")
    running = procs.spawn("head", HeadActor).run.call_one(spec, slurm, preempted)
    told = running.get(timeout=PATIENCE * 3)
    procs.stop().get(timeout=PATIENCE)
    monarch.actor.shutdown_context().get(timeout=PATIENCE)
    told["alive"], told["state"] = alive(slurm), slurm.facts["state"]
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    given = RunSpec.model_validate(json.loads(sys.argv[2]))
    main(Path(sys.argv[1]), given, sys.argv[3] == "preempted")
