"""Pods as workers, against a stand-in of the API server: rights, watches, faults."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable

import pytest
from api_server import ApiServer
from api_store import Fault, Refusal
from kubernetes_scenarios import (
    CONTROLLER,
    EIGHT,
    POOLS,
    PROVISION,
    SCENARIOS,
    Cluster,
    Object,
    Seen,
    hosts,
    spec,
    until,
)
from operator_loop import MESHES, PODS
from rooms.services.kubernetes_setup import running

from cartridge_forge.plugins.cluster.hosts.kubernetes import KubernetesHosts
from cartridge_forge.protocols.errors import RunError


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
