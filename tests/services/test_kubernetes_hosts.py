"""Pods as workers, against a stand-in of the API server: rights, watches, faults."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from api_server import ADMIN, ApiServer, Fault
from kubernetes_scenarios import (
    BASE,
    CONTROLLER,
    EIGHT,
    POOLS,
    PROVISION,
    SCENARIOS,
    SPACE,
    Cluster,
    component,
    hosts,
    spec,
    until,
)
from operator_loop import Admin, OperatorLoop, not_ready, ready

from cluster.check import definitions
from protocols.errors import RunError
from services.kubernetes_hosts import KubernetesHosts

KINDS = definitions()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with ApiServer(BASE, KINDS) as found:
        config = found.kubeconfig(tmp_path / "controller.yaml", CONTROLLER)
        monkeypatch.setenv("KUBECONFIG", str(config))
        yield found


@pytest.fixture
def cluster(server: ApiServer, tmp_path: Path) -> Iterator[Cluster]:
    admin = Admin(server.kubeconfig(tmp_path / "admin.yaml", ADMIN), SPACE)
    with OperatorLoop(admin) as operator:
        yield Cluster(operator, lambda name: server.roles.extend(component(name)))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_a_run(scenario: Callable[[Cluster], Awaitable[None]], cluster: Cluster) -> None:
    asyncio.run(scenario(cluster))  # type: ignore[arg-type]
