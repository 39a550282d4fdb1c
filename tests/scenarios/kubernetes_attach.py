"""Real workers as the pods of a stand-in cluster: found, attached to, and one found again after it
was replaced at another address. Prints what answered as one JSON object.

Run by tests/mesh/plugins/cluster/hosts/test_kubernetes.py: the transport is of the whole
process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from api_server import ApiServer
from api_store import ADMIN
from monarch.actor import Actor, enable_transport, endpoint
from operator_loop import Admin, OperatorLoop

from cartridge_forge.forge_run.commands.k8s import render
from cartridge_forge.plugins.cluster.checks.schemas import definitions
from cartridge_forge.plugins.cluster.hosts.kubernetes import KubernetesHosts
from cartridge_forge.plugins.cluster.hosts.membership import attach
from cartridge_forge.plugins.cluster.manifests.overlays import build
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.services.pool.hosts import HostWorker

MESH = str(Path(__file__).parents[2] / "meshes" / "longhealth.yaml")
SETS = ("hosts=kubernetes", "roles.generator.replicas=1")
SPACE = "forge-longhealth"
WORKER = (
    "import sys; from monarch.actor import run_worker_loop_forever; "
    "run_worker_loop_forever(address=sys.argv[1], ca='trust_all_connections')"
)


class Who(Actor):
    @endpoint
    async def parent(self) -> int:
        return os.getppid()


class Pods:
    """A worker process for each pod that the operator starts; each has an address of its own."""

    def __init__(self) -> None:
        self._numbers = itertools.count(2)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, pod: str) -> str:
        ip = f"127.0.77.{next(self._numbers)}"
        if pod in self.processes:
            self.processes[pod].kill()
        self.processes[pod] = subprocess.Popen(
            [sys.executable, "-c", WORKER, f"tcp://{ip}:26600"], stdin=subprocess.DEVNULL
        )
        time.sleep(0.5)  # as long as a readiness probe would wait
        return ip

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


async def answering(worker: HostWorker) -> int:
    """The worker's process, by what it started."""
    mesh = await attach(worker.address)
    procs = mesh.spawn_procs(per_host={"gpus": 1})
    who = procs.spawn("who", Who)
    found: int = await asyncio.wait_for(who.parent.call_one(), 60)
    return found


async def go(operator: OperatorLoop, pods: Pods) -> dict[str, object]:
    hosts = KubernetesHosts(load_spec(MESH, sets=SETS).spec)
    answers = hosts.workers()
    first = await anext(answers)
    told = [await answering(worker) for worker in first]
    started = [pods.processes[worker.name].pid for worker in first]
    operator.lose("generator-0")
    async for now in answers:
        new = [w for w in now if w.name == "generator-0" and w not in first]
        if new:
            break
    again = await answering(new[0])
    await answers.aclose()
    await hosts.close()
    return {
        "names": [worker.name for worker in first],
        "told": told,
        "started": started,
        "again": again == pods.processes["generator-0"].pid,
    }


def main() -> None:
    enable_transport("tcp://127.0.0.1:0")
    objects = build(render(MESH, SETS[1:]), "base")
    pods = Pods()
    with tempfile.TemporaryDirectory() as folder, ApiServer(objects, definitions()) as server:
        account = f"system:serviceaccount:{SPACE}:forge-controller"
        config = server.kubeconfig(Path(folder, "controller.yaml"), account)
        os.environ["KUBECONFIG"] = str(config)
        admin = Admin(server.kubeconfig(Path(folder, "admin.yaml"), ADMIN), SPACE)
        try:
            with OperatorLoop(admin, pods.start) as operator:
                operator.apply(*(o for o in objects if o["kind"] == "MonarchMesh"))
                report = asyncio.run(go(operator, pods))
        finally:
            pods.end()
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    os._exit(0)  # meshes of killed workers would be waited for


if __name__ == "__main__":
    main()
