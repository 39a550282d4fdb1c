"""The scenarios of test_kubernetes.py, put to a real API server: `make k8s-apiserver`.

No part of the test suite: pytest collects it where it is named. kube_apiserver.sh starts
the server; its pods are objects alone, which tests/fakes/operator_loop.py plays.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from applying import KINDS, PATHS, structural
from kubernetes_scenarios import BASE, CONTROLLER, SCENARIOS, SPACE, Cluster, component
from operator_loop import MESHES, Admin, OperatorLoop

from cartridge_forge.plugins.cluster.checks.schemas import definitions

Object = dict[str, Any]

REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


@pytest.fixture(scope="session")
def folder() -> Path:
    found = os.environ.get("FORGE_KUBE_APISERVER")
    if not found:
        pytest.exit("no API server: run `make k8s-apiserver`", returncode=3)
    return Path(found)


@pytest.fixture(scope="session")
def admin(folder: Path) -> Iterator[Admin]:
    """With the operator's kind, and all of the base but its pools."""
    found = Admin(folder / "admin.yaml", SPACE)
    (kind,) = (d for d in definitions() if d["spec"]["names"]["kind"] == "MonarchMesh")
    assert found.call("POST", KINDS, structural(kind)) is not None
    for thing in BASE:
        if thing["kind"] != "MonarchMesh":
            # Strictly: from 1.25 on, a field that the server does not know is refused.
            found.call("POST", PATHS[thing["kind"]] + "?fieldValidation=Strict", thing)
    wait_until(lambda: allowed(found, "watch", "pods", ""))
    wait_until(lambda: found.call("GET", MESHES) is not None)
    yield found
    found.close()


@pytest.fixture
def cluster(folder: Path, admin: Admin, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(folder / "controller.yaml"))
    given: list[Object] = []

    def grant(name: str) -> None:
        given.extend(component(name))
        for found in given:
            admin.call("POST", PATHS[found["kind"]], found)
        wait_until(lambda: may_scale(admin))

    with OperatorLoop(Admin(folder / "admin.yaml", SPACE)) as operator:
        yield Cluster(operator, grant, short_s=6.0)
        operator.scripts.clear()
        for found in given:
            admin.call("DELETE", f"{PATHS[found['kind']]}/{found['metadata']['name']}")
        for mesh in operator.meshes():
            admin.call("DELETE", f"{MESHES}/{mesh}")
        wait_until(lambda: not operator.pods() and not may_scale(admin))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_a_run(scenario: Callable[[Cluster], Awaitable[None]], cluster: Cluster) -> None:
    asyncio.run(scenario(cluster))  # type: ignore[arg-type]


def test_the_manifests_are_there(admin: Admin) -> None:
    """All that the server's version has a kind for."""
    for thing in BASE:
        path = PATHS[thing["kind"]]
        if thing["kind"] != "MonarchMesh" and admin.call("GET", path) is not None:
            assert admin.call("GET", f"{path}/{thing['metadata']['name']}") is not None, thing


def may_scale(admin: Admin) -> bool:
    return allowed(admin, "patch", "monarchmeshes", "monarch.pytorch.org", "trainer")


def allowed(admin: Admin, verb: str, resource: str, group: str, name: str = "") -> bool:
    """What the server holds of the controller's rights: it learns of changes a little later."""
    attributes = {"namespace": SPACE, "verb": verb, "resource": resource, "group": group}
    body = {"spec": {"user": CONTROLLER, "resourceAttributes": {**attributes, "name": name}}}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", **body}
    found = admin.call("POST", REVIEWS, review)
    return found is not None and bool(found["status"]["allowed"])


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)
