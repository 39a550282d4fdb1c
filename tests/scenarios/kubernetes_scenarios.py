"""What a run does with a cluster, put to the stand-in of its API server and to a real one."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import ApiServer
from manifest_checks.check import committed
from operator_loop import OperatorLoop, not_ready, ready, unschedulable, waiting

from cartridge_forge.plugins.cluster.checks.schemas import definitions
from cartridge_forge.plugins.cluster.hosts.kubernetes import KubernetesHosts
from cartridge_forge.plugins.cluster.manifests.overlays import build
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.pool.hosts import HostWorker

Object = dict[str, Any]

REPOSITORY = Path(__file__).parents[2]
MESH = str(REPOSITORY / "meshes" / "three_channels.yaml")
SPACE = "forge-three-channels"
CONTROLLER = f"system:serviceaccount:{SPACE}:forge-controller"
PATIENCE_S = 60.0  # of anything that takes a fraction of a second
TREE = committed()
BASE = build(TREE, "base")
POOLS = [o for o in BASE if o["kind"] == "MonarchMesh"]
EIGHT = [
    "generator-0", "generator-1", "docteacher-0", "sdpoteacher-0", "environment-0",
    "teacherreplay-0", "teacherreplay-1", "trainer-0",
]  # fmt: skip


@dataclass
class Cluster:
    """An API server with an operator. `grant` gives the controller the rights of a component;
    after `short_s` all pods are as the operator left them."""

    operator: OperatorLoop
    grant: Callable[[str], None]
    short_s: float


@contextmanager
def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """One with the Roles of the base; the kubeconfig in force is the controller's."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with ApiServer(BASE, definitions()) as found:
        config = found.kubeconfig(folder / "controller.yaml", CONTROLLER)
        monkeypatch.setenv("KUBECONFIG", str(config))
        yield found


def component(name: str) -> list[Object]:
    """The Role and RoleBinding of deploy/k8s/components."""
    return list(yaml.safe_load_all(TREE[f"components/{name}/access.yaml"]))


def spec(*sets: str) -> RunSpec:
    given = ("replay.local=null", "hosts=kubernetes", f"spawn_timeout_s={PATIENCE_S}", *sets)
    return load_spec(MESH, sets=given).spec


PROVISION = "hosts={kind: kubernetes, kubernetes: {provision: true, image: 'forge:7'}}"


class Seen:
    """What `workers` yields. `until` waits for the first answer that is so."""

    def __init__(self, hosts: KubernetesHosts) -> None:
        self.hosts = hosts
        self.answers = hosts.workers()

    async def until(self, is_: Callable[[tuple[HostWorker, ...]], bool]) -> tuple[HostWorker, ...]:
        async with asyncio.timeout(PATIENCE_S):
            async for answer in self.answers:
                if is_(answer):
                    return answer
        raise AssertionError("it ended")

    async def first(self) -> tuple[HostWorker, ...]:
        return await self.until(lambda _: True)

    async def names(self, *names: str) -> tuple[HostWorker, ...]:
        return await self.until(lambda answer: [w.name for w in answer] == list(names))


@asynccontextmanager
async def hosts(*sets: str) -> AsyncIterator[Seen]:
    """KubernetesHosts that are closed at the end, with no thread left."""
    found = KubernetesHosts(spec(*sets))
    seen = Seen(found)
    try:
        yield seen
    finally:
        await seen.answers.aclose()
        await found.close()
        await until(lambda: not [t for t in threading.enumerate() if t.name == "pods"])


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(is_so):  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.01)


async def attaches(cluster: Cluster) -> None:
    cluster.operator.apply(*POOLS)
    async with hosts() as seen:
        found = await seen.first()
        assert [w.name for w in found] == EIGHT
        assert found[5].role == "teacher_replay"
        assert {w.capacity for w in found} == {1}
        ips = {name: pod["status"]["podIP"] for name, pod in cluster.operator.pods().items()}
        assert {w.name: w.address for w in found} == {
            name: f"tcp://{ip}:26600" for name, ip in ips.items()
        }


async def replaces(cluster: Cluster) -> None:
    """A pod that is deleted leaves at once, and comes back under its name elsewhere."""
    cluster.operator.apply(*POOLS)
    async with hosts() as seen:
        (old,) = (w for w in await seen.first() if w.name == "generator-0")
        cluster.operator.lose("generator-0")
        back = await seen.until(
            lambda now: any(w.name == old.name and w.address != old.address for w in now)
        )
        assert [w.name for w in back] == EIGHT


async def waits_for_late_pods(cluster: Cluster) -> None:
    cluster.operator.scripts["trainer-0"] = unschedulable("0/3 nodes are available.")
    cluster.operator.apply(*POOLS)
    async with hosts() as seen:
        first = asyncio.ensure_future(seen.first())
        await until(lambda: len(cluster.operator.pods()) == len(EIGHT))
        await asyncio.sleep(0.1)
        assert not first.done()
        cluster.operator.set("trainer-0", ready("10.0.1.1"))
        assert (await first)[-1] == HostWorker("trainer-0", "tcp://10.0.1.1:26600", "trainer", 1)


async def tells_what_pods_lack(cluster: Cluster) -> None:
    scripts = {
        "generator-0": unschedulable("0/3 nodes are available: 3 Insufficient cpu."),
        "generator-1": waiting("ImagePullBackOff", 'Back-off pulling image "forge:7"'),
        "docteacher-0": waiting(
            "CrashLoopBackOff",
            "back-off 5m0s restarting failed container",
            last={"exitCode": 137, "reason": "OOMKilled"},
        ),
        "sdpoteacher-0": not_ready("10.0.1.2"),
    }
    cluster.operator.scripts |= scripts
    cluster.operator.apply(*(p for p in POOLS if p["metadata"]["name"] != "trainer"))
    async with hosts(f"spawn_timeout_s={cluster.short_s}") as seen:
        with pytest.raises(RunError) as caught:
            await seen.first()
    assert str(caught.value).splitlines() == [
        f"not all pods in namespace {SPACE} were ready within {cluster.short_s:g} s; correct what "
        "they lack, or raise spawn_timeout_s:",
        "  generator-0: Unschedulable: 0/3 nodes are available: 3 Insufficient cpu.; add nodes, or "
        "ask for less in the mesh file",
        '  generator-1: ImagePullBackOff: Back-off pulling image "forge:7"; push the image to '
        "where the nodes find it, or correct its name",
        "  docteacher-0: CrashLoopBackOff: back-off 5m0s restarting failed container; ended with "
        f"exit code 137 (OOMKilled); read `kubectl logs -n {SPACE} docteacher-0 --previous`",
        "  sdpoteacher-0: NotReady: its readiness probe has not passed",
        "  trainer: no pods",
    ]


async def tells_what_pods_lack_while_it_runs(cluster: Cluster) -> None:
    cluster.operator.apply(*POOLS)
    async with hosts() as seen:
        await seen.first()
        assert list(seen.hosts.lacking()) == []
        cluster.operator.set("generator-1", waiting("ImagePullBackOff", "Back-off pulling"))
        await seen.until(lambda now: all(w.name != "generator-1" for w in now))
        assert list(seen.hosts.lacking()) == [
            "generator-1: ImagePullBackOff: Back-off pulling; push the image to where the nodes "
            "find it, or correct its name"
        ]


async def scales(cluster: Cluster) -> None:
    """More teachers come, and the last are taken away."""
    cluster.grant("scaling")
    cluster.operator.apply(*POOLS)
    others = [name for name in EIGHT if not name.startswith("teacherreplay")]
    async with hosts() as seen:
        await seen.first()
        await seen.hosts.want("teacher_replay", 8)
        more = [f"teacherreplay-{i}" for i in range(8)]
        await seen.names(*others[:-1], *more, "trainer-0")
        await seen.hosts.want("teacher_replay", 8)  # nothing to do
        await seen.hosts.want("teacher_replay", 3)
        await seen.names(*others[:-1], *more[:3], "trainer-0")
        assert list(seen.hosts.lacking()) == []
        with pytest.raises(RunError, match="trainer cannot have 0 replicas"):
            await seen.hosts.want("trainer", 0)
    assert cluster.operator.meshes()["teacherreplay"] == 3  # closing takes nothing away


async def may_not_scale(cluster: Cluster) -> None:
    """The rights of the base are enough to attach, and for nothing else."""
    cluster.operator.apply(*POOLS)
    async with hosts() as seen:
        assert len(await seen.first()) == len(EIGHT)
        with pytest.raises(RunError) as caught:
            await seen.hosts.want("teacher_replay", 8)
    said = str(caught.value)
    assert "may not get monarchmeshes.monarch.pytorch.org/teacherreplay" in said
    assert "apply deploy/k8s/components/scaling" in said
    assert (
        f"`kubectl auth can-i get monarchmeshes.monarch.pytorch.org/teacherreplay -n {SPACE}`"
        in said
    )
    assert CONTROLLER in said


async def may_scale_its_own_alone(cluster: Cluster) -> None:
    cluster.grant("scaling")
    async with hosts() as seen:
        with pytest.raises(RunError, match=r"may not get monarchmeshes\S+/other in namespace"):
            await asyncio.to_thread(seen.hosts._api.mesh, "other")
        with pytest.raises(RunError, match=r"may not create monarch.*components/provisioning"):
            await asyncio.to_thread(seen.hosts._api.create, POOLS[0])


async def provisions(cluster: Cluster) -> None:
    """The meshes are made and scaled, and are gone at the end, with those of nobody else."""
    cluster.grant("provisioning")
    other = copy.deepcopy(POOLS[0])
    other["metadata"]["name"] = "other"
    other["spec"]["podTemplate"]["metadata"]["labels"]["app.kubernetes.io/instance"] = "other"
    cluster.operator.apply(other)
    async with hosts(PROVISION) as seen:
        assert [w.name for w in await seen.until(lambda now: len(now) >= 8)][:2] == EIGHT[:2]
        pod = cluster.operator.pods()["trainer-0"]
        assert pod["spec"]["containers"][0]["image"] == "forge:7"
        await seen.hosts.want("teacher_replay", 3)
        await seen.until(lambda now: sum(w.role == "teacher_replay" for w in now) == 3)
    assert cluster.operator.meshes() == {"other": 2}


async def may_not_provision(cluster: Cluster) -> None:
    cluster.grant("scaling")
    async with hosts(PROVISION) as seen:
        with pytest.raises(RunError, match=r"may not create .*components/provisioning"):
            await seen.first()
    assert cluster.operator.meshes() == {}


async def leaves_anothers_meshes(cluster: Cluster) -> None:
    """Where one mesh is another's, those made before it are taken back."""
    cluster.grant("provisioning")
    cluster.operator.apply(*(p for p in POOLS if p["metadata"]["name"] == "trainer"))
    async with hosts(PROVISION) as seen:
        with pytest.raises(RunError, match=r"MonarchMesh trainer is in namespace .* already"):
            await seen.first()
        assert cluster.operator.meshes() == {"trainer": 1}
    assert cluster.operator.meshes() == {"trainer": 1}


async def refuses_what_the_kind_does_not_allow(cluster: Cluster) -> None:
    cluster.grant("provisioning")
    cluster.operator.apply(*POOLS)
    async with hosts() as seen:
        with pytest.raises(RunError, match=r"did not patch .*\(422: .*replicas.*correct the mesh"):
            await asyncio.to_thread(seen.hosts._api.scale, "trainer", 0)


SCENARIOS = (
    attaches,
    replaces,
    waits_for_late_pods,
    tells_what_pods_lack,
    tells_what_pods_lack_while_it_runs,
    scales,
    may_not_scale,
    may_scale_its_own_alone,
    provisions,
    may_not_provision,
    leaves_anothers_meshes,
    refuses_what_the_kind_does_not_allow,
)
