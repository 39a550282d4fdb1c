"""Pods as workers, against a stand-in of the API server: rights, watches, faults."""

from __future__ import annotations

import asyncio

import pytest
from api_server import ApiServer
from api_store import Fault
from kubernetes_scenarios import EIGHT, POOLS, PROVISION, SPACE, Cluster, hosts, until
from operator_loop import not_ready, ready
from rooms.services.kubernetes_setup import running

from cartridge_forge.protocols.errors import RunError


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
