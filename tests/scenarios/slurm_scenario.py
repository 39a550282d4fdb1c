"""A Slurm job of two nodes until it is cancelled or preempted; prints what happened as JSON.

`tests/mesh/plugins/cluster/hosts/test_slurm.py` starts it, in a directory of its own, and judges.
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
from monarch.actor import Actor, concurrent_endpoint
from monarch.config import get_global_config

from cartridge_forge.plugins.cluster.hosts import slurm as slurm_hosts
from cartridge_forge.plugins.cluster.hosts.slurm import SlurmHosts
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.pool.service import Service

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
    """Whoever drives a run is an actor itself, as the controller is."""

    @concurrent_endpoint
    async def run(self, spec: RunSpec, slurm: Cluster, preempted: bool) -> dict[str, Any]:
        slurm_hosts.WATCH_SECONDS = 0.2
        source = SlurmHosts(spec)
        transports = [str(get_global_config()["default_transport"])]
        found = source.workers()
        workers = await anext(found)
        told: dict[str, Any] = {"transports": transports}
        told["workers"] = [[w.name, w.address, w.role, w.capacity] for w in workers]
        transports.append(str(get_global_config()["default_transport"]))
        meshes = [w.mesh for w in workers if w.mesh is not None]
        service = await Service.of(meshes, local=False)
        pool = service.spawn(WhoActor, n=4, role="who")
        await pool.settled(PATIENCE)
        told["hosts"] = sorted(r.process.host for r in pool.replicas if r.process)
        told["who"] = await pool.route("who")
        await service.stop()
        if preempted:
            slurm.preempt()
            try:
                await asyncio.wait_for(anext(found), PATIENCE)
            except RunError as error:
                told["end"] = str(error)
        await found.aclose()
        await source.close()
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
