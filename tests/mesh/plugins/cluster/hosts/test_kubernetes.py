"""Test hosts on Kubernetes: their pods, attaching, faults."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from api_server import ApiServer
from api_store import Fault, Refusal
from kubernetes_scenarios import (
    CONTROLLER,
    EIGHT,
    POOLS,
    PROVISION,
    SCENARIOS,
    SPACE,
    Cluster,
    Object,
    Seen,
    hosts,
    spec,
    until,
)
from operator_loop import MESHES, PODS, not_ready, ready
from rooms.services.kubernetes_setup import running

from cartridge_forge.plugins.cluster.hosts.kubernetes import KubernetesHosts
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.services.pool.hosts import LINK_ENVIRONMENT


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_a_run(scenario: Callable[[Cluster], Awaitable[None]], cluster: Cluster) -> None:
    asyncio.run(scenario(cluster))  # type: ignore[arg-type]


@pytest.mark.parametrize("breakage", ["cut", "cut and forgotten", "down for a while"])
def test_a_watch_that_breaks_misses_nothing(
    breakage: str, server: ApiServer, cluster: Cluster
) -> None:
    async def go() -> None:
        async with hosts() as seen:
            await running(cluster, seen)
            await until(lambda: server.watching() > 0)
            before = len(server.requests)
            # What happens while nobody watches is found out all the same.
            uid = cluster.operator.pods()["generator-1"]["metadata"]["uid"]
            if breakage != "cut":
                away = Fault(503, 3 if breakage == "down for a while" else 1000, "watch")
                server.faults.append(away)
            server.cut_watches()
            cluster.operator.lose("generator-1")
            if breakage == "cut and forgotten":
                await until(
                    lambda: (
                        (pod := cluster.operator.pods().get("generator-1")) is not None
                        and pod["metadata"]["uid"] != uid
                    )
                )
                server.forget()
                server.faults.clear()
            await seen.until(
                lambda now: any(
                    w.name == "generator-1" and w.address not in OF_FIRST_PODS for w in now
                )
            )
            asked = [verb for user, verb, _ in server.requests[before:] if user == CONTROLLER]
            assert "watch" in asked
            assert ("list" in asked) is (breakage == "cut and forgotten")

    asyncio.run(go())


OF_FIRST_PODS = {f"tcp://10.0.0.{number}:26600" for number in range(1, 9)}


def test_bookmarks_move_the_version_on(server: ApiServer, cluster: Cluster) -> None:
    async def go() -> None:
        server.bookmark_s = 0.05
        async with hosts() as seen:
            await running(cluster, seen)
            # Nothing of ours: without a bookmark the watch would go on from before it, and be too
            # old for it.
            other = copy.deepcopy(POOLS[0])
            other["metadata"]["name"] = "other"
            labels = other["spec"]["podTemplate"]["metadata"]["labels"]
            labels["app.kubernetes.io/instance"] = "other"
            cluster.operator.apply(other)
            await until(lambda: len(cluster.operator.pods()) == 10)
            sent = len(server.marked)
            await until(lambda: len(server.marked) >= sent + 5)  # the last of the version of now
            before = len(server.requests)
            server.forget()
            server.cut_watches()
            cluster.operator.lose("trainer-0")
            await seen.until(lambda now: now[-1].name != "trainer-0")
            asked = {verb for user, verb, _ in server.requests[before:] if user == CONTROLLER}
            assert asked == {"watch"}

    asyncio.run(go())


def test_what_is_put_off_is_asked_again(server: ApiServer, cluster: Cluster) -> None:
    server.faults += [
        Fault(429, 1, "list", "pods", {"Retry-After": "1"}),
        Fault(500, 2, "create"),
        Fault(503, 1, "patch"),
        Fault(409, 1, "patch"),
    ]
    cluster.grant("provisioning")

    async def go() -> None:
        async with hosts(PROVISION) as seen:
            assert [w.name for w in await seen.until(lambda now: len(now) >= 8)] == EIGHT
            await seen.hosts.want("generator", 3)
            await seen.until(lambda now: len(now) == 9)

    asyncio.run(go())
    assert server.faults == []
    assert cluster.operator.meshes() == {}


def test_meshes_of_a_failed_start_are_taken_back(server: ApiServer, cluster: Cluster) -> None:
    """Two are made; the third has no answer in time, and is made all the same."""
    cluster.grant("provisioning")
    made = iter(range(100))
    create = server.create

    def third_is_lost(resource: str, space: str, body: Object) -> Object:
        found = create(resource, space, body)
        if resource == "monarchmeshes" and next(made) >= 2:
            raise Refusal(504, "Timeout", "request did not complete within the allotted timeout")
        return found

    server.create = third_is_lost  # type: ignore[method-assign]

    async def goes_on() -> None:
        """Its answer was lost, and what it made is known again as ours."""
        async with hosts(PROVISION) as seen:
            assert len(await seen.until(lambda now: len(now) >= 8)) == 8

    asyncio.run(goes_on())
    assert cluster.operator.meshes() == {}

    def third_is_refused(resource: str, space: str, body: Object) -> Object:
        if resource == "monarchmeshes" and len(cluster.operator.meshes()) == 2:
            raise Refusal(422, "Invalid", "quota of meshes exceeded")
        return create(resource, space, body)

    server.create = third_is_refused  # type: ignore[method-assign]

    async def fails() -> None:
        async with hosts(PROVISION) as seen:
            with pytest.raises(RunError, match="quota of meshes exceeded"):
                await seen.first()
            assert cluster.operator.meshes() == {}

    asyncio.run(fails())


def controller_pod(cluster: Cluster, name: str) -> str:
    """A pod of the Job's; its uid."""
    body = {"kind": "Pod", "metadata": {"name": name}, "spec": {"nodeName": "node-1"}}
    made = cluster.operator.admin.call("POST", PODS, body)
    assert made is not None
    return str(made["metadata"]["uid"])


def test_meshes_belong_to_the_controllers_pod(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next pod of the Job makes them anew, once the one before has ended; not while it runs."""
    cluster.grant("provisioning")

    def becomes(name: str) -> None:
        monkeypatch.setenv("POD_NAME", name)
        monkeypatch.setenv("POD_UID", controller_pod(cluster, name))

    def meshes() -> list[Object]:
        return cluster.operator.admin.items(MESHES)

    async def killed() -> None:
        seen = Seen(KubernetesHosts(spec(PROVISION)))
        await seen.until(lambda now: len(now) == 8)
        await seen.answers.aclose()

    becomes("controller-a")
    asyncio.run(killed())
    (owner,) = {m["metadata"]["ownerReferences"][0]["name"] for m in meshes()}
    assert owner == "controller-a"

    async def beside_it() -> None:
        async with hosts(PROVISION) as seen:
            with pytest.raises(RunError, match=r"generator is in namespace .* already"):
                await seen.first()

    becomes("controller-b")
    asyncio.run(beside_it())
    assert len(meshes()) == 6

    async def after_it() -> None:
        uids = {m["metadata"]["uid"] for m in meshes()}
        async with hosts(PROVISION) as seen:
            await seen.until(lambda now: len(now) == 8)
            assert not uids & {m["metadata"]["uid"] for m in meshes()}

    failed = {"status": {"phase": "Failed"}}
    cluster.operator.admin.call("PATCH", f"{PODS}/controller-a/status", failed)
    becomes("controller-c")
    asyncio.run(after_it())
    assert meshes() == []


SCENARIO = Path(__file__).parents[4] / "scenarios/kubernetes_attach.py"


def test_pods_are_workers() -> None:
    done = subprocess.run(
        [sys.executable, str(SCENARIO)],
        env={**os.environ, **LINK_ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["names"] == ["generator-0", "docteacher-0", "trainer-0"]
    assert report["told"] == report["started"]
    assert report["again"]


def test_a_probe_that_fails_for_a_while_ends_no_worker(cluster: Cluster) -> None:
    """A container that ends does, though its pod stays."""

    async def go() -> None:
        async with hosts() as seen:
            await running(cluster, seen)
            ip = cluster.operator.pods()["trainer-0"]["status"]["podIP"]
            cluster.operator.set("trainer-0", not_ready(ip))
            cluster.operator.set("generator-1", {**not_ready("10.0.0.99"), "phase": "Failed"})
            assert [w.name for w in await seen.first()] == [n for n in EIGHT if n != "generator-1"]
            ended = not_ready(ip)
            ended["containerStatuses"][0] |= {"restartCount": 1}
            cluster.operator.set("trainer-0", ended)
            await seen.names(*(n for n in EIGHT[:-1] if n != "generator-1"))
            cluster.operator.set("trainer-0", ready(ip, restarts=1))
            assert (await seen.first())[-1].name == "trainer-0"

    asyncio.run(go())


def test_a_run_goes_on_while_the_api_server_refuses(
    server: ApiServer, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        async with hosts() as seen:
            cluster.operator.apply(*POOLS)
            first = await seen.first()
            roles = server.roles[:]
            server.roles.clear()
            server.cut_watches()
            next_one = asyncio.ensure_future(seen.first())
            await until(lambda: "pods are not watched for now: may not watch" in caplog.text)
            assert not next_one.done()
            server.roles += roles
            cluster.operator.lose("generator-1")
            assert await next_one != first  # seen without it, or with the one after it already

    asyncio.run(go())


def test_what_is_put_off_for_long_is_told(
    server: ApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cartridge_forge.plugins.cluster.hosts.kubernetes_client.PATIENCE_S", 0.5)
    server.faults.append(Fault(500, 1000, "get", "monarchmeshes"))
    cluster.grant("scaling")

    async def go() -> None:
        async with hosts() as seen:
            with pytest.raises(RunError, match=r"did not get .*\(500: etcdserver: leader changed"):
                await seen.hosts.want("generator", 3)

    asyncio.run(go())


def test_a_start_that_is_cancelled_leaves_nothing(server: ApiServer, cluster: Cluster) -> None:
    cluster.grant("provisioning")
    server.faults.append(Fault(0, 1, "create", "monarchmeshes", delay_s=0.5))

    async def go() -> None:
        async with hosts(PROVISION) as seen:
            starting = asyncio.ensure_future(anext(seen.answers))
            await until(lambda: any(verb == "create" for _, verb, _ in server.requests))
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
        assert server.listed("monarchmeshes", SPACE, "")["items"] == []

    asyncio.run(go())


def test_a_missing_operator_is_named(server: ApiServer, cluster: Cluster) -> None:
    server.installed = False
    cluster.grant("provisioning")

    async def go() -> None:
        async with hosts(PROVISION) as seen:
            with pytest.raises(RunError, match=r"knows no monarchmeshes.*install the operator"):
                await seen.first()

    asyncio.run(go())


def test_no_pods_at_all(cluster: Cluster) -> None:
    async def go() -> None:
        async with hosts("spawn_timeout_s=0.3") as seen:
            with pytest.raises(RunError) as caught:
                await seen.first()
        assert "\n  generator: no pods\n" in str(caught.value)
        assert str(caught.value).endswith(
            f"check that the operator runs (`kubectl get monarchmeshes,pods -n {SPACE}`) and that "
            "the manifests are applied: `kubectl apply -k deploy/k8s/overlays/cpu`"
        )

    asyncio.run(go())
