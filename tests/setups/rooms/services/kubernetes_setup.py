"""A cluster of an API server that stands in, and an operator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_server import ApiServer
from api_store import ADMIN
from kubernetes_scenarios import EIGHT, POOLS, SPACE, Cluster, Seen, component, stand_in
from operator_loop import Admin, OperatorLoop

from cartridge_forge.plugins.cluster.hosts import kubernetes


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """Yield the API server."""
    with stand_in(tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def cluster(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    """Yield a cluster whose operator has the rights of the admin."""
    admin = Admin(server.kubeconfig(tmp_path / "admin.yaml", ADMIN), SPACE)
    monkeypatch.setattr(kubernetes, "POLL_S", 0.05)
    with OperatorLoop(admin) as operator:
        yield Cluster(operator, lambda name: server.roles.extend(component(name)), short_s=1.5)


async def running(cluster: Cluster, seen: Seen) -> None:
    """The eight pods are attached to."""
    cluster.operator.apply(*POOLS)
    assert [w.name for w in await seen.first()] == EIGHT
