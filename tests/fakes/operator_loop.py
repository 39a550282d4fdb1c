"""What a cluster does about MonarchMeshes, played over the API: pods made, started, ended.

The Monarch operator with its StatefulSets (pods <mesh>-0, -1, ...; the highest are taken away
first), the scheduler, kubelet (addresses, statuses, readiness) and the garbage collector, in one
loop of a thread. It asks any API server, the stand-in or a real one.
"""

from __future__ import annotations

import base64
import itertools
import json
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import urllib3
import yaml

Object = dict[str, Any]

MESHES = "/apis/monarch.pytorch.org/v1alpha1/namespaces/{space}/monarchmeshes"
PODS = "/api/v1/namespaces/{space}/pods"
MADE = "monarch.pytorch.org/mesh-name"  # label of the operator's pods
READY = {"type": "Ready", "status": "True"}


class Admin:
    """Requests by a kubeconfig with a token; a refusal is an AssertionError, 404 is None."""

    def __init__(self, kubeconfig: Path, space: str) -> None:
        config = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
        cluster = config["clusters"][0]["cluster"]
        pem = base64.b64decode(cluster["certificate-authority-data"]).decode()
        context = ssl.create_default_context(cadata=pem)
        self._pool = urllib3.PoolManager(ssl_context=context, retries=False, timeout=10, maxsize=4)
        self._server, self._token = cluster["server"], config["users"][0]["user"]["token"]
        self._space = space

    def call(
        self, method: str, path: str, body: Object | None = None, *, again: bool = True
    ) -> Object | None:
        """The answer; `again` asks anew when the server says that it is too early."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        while True:
            answer = self._pool.request(
                method,
                self._server + path.format(space=self._space),
                body=None if body is None else json.dumps(body),
                headers={"Authorization": f"Bearer {self._token}", "Content-Type": kind},
            )
            # A kind that was just made has no storage yet.
            if answer.status != 429 or not again:
                break
            time.sleep(0.1)
        if answer.status in (404, 409):  # gone, or there already: a loop comes by again
            return None
        assert answer.status < 300, (method, path, answer.status, answer.data)
        found: Object = json.loads(answer.data)
        return found

    def items(self, path: str) -> list[Object]:
        found = self.call("GET", path)
        return [] if found is None else found["items"]

    def close(self) -> None:
        self._pool.clear()


def ready(ip: str, restarts: int = 0) -> Object:
    """The status of a pod that runs."""
    container = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    return {
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "conditions": [{"type": "PodScheduled", "status": "True"}, READY],
        "containerStatuses": [_container(container, restarts=restarts, ready=True)],
    }


def waiting(reason: str, message: str, *, last: Object | None = None) -> Object:
    """The status of a pod whose container does not start; `last` is how it ended before."""
    state = {"waiting": {"reason": reason, "message": message}}
    return {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "True"}],
        "containerStatuses": [_container(state, last=last, restarts=3 if last else 0)],
    }


def unschedulable(message: str) -> Object:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    return {"phase": "Pending", "conditions": [{**condition, "message": message}]}


def not_ready(ip: str) -> Object:
    """A pod that runs and whose probe fails."""
    found = ready(ip)
    found["conditions"] = [{"type": "PodScheduled", "status": "True"}, {**READY, "status": "False"}]
    found["containerStatuses"][0]["ready"] = False
    return found


def _container(
    state: Object, *, last: Object | None = None, restarts: int = 0, ready: bool = False
) -> Object:
    more = {"lastState": {"terminated": last}} if last else {}
    name = {"name": "worker", "image": "x", "imageID": "", "ready": ready}
    return {**name, "restartCount": restarts, "state": state, **more}


class OperatorLoop:
    """Runs until closed. `scripts` holds statuses, by the pod's name, instead of being ready."""

    def __init__(self, admin: Admin, address: Callable[[str], str] | None = None) -> None:
        self.admin = admin
        self.scripts: dict[str, Object] = {}
        numbers = itertools.count(1)
        self._address = address or (lambda _: f"10.0.0.{next(numbers)}")
        self._over = threading.Event()
        self._leaving: set[str] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> OperatorLoop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.admin.close()

    def apply(self, *meshes: Object) -> None:
        for mesh in meshes:
            self.admin.call("POST", MESHES, mesh)

    def meshes(self) -> dict[str, int]:
        """Replicas by name."""
        return {m["metadata"]["name"]: m["spec"]["replicas"] for m in self.admin.items(MESHES)}

    def pods(self) -> dict[str, Object]:
        return {pod["metadata"]["name"]: pod for pod in self.admin.items(PODS)}

    def set(self, pod: str, status: Object) -> None:
        """From now on, and for all that follow of that name."""
        self.scripts[pod] = status
        self.admin.call("PATCH", f"{PODS}/{pod}/status", {"status": status})

    def lose(self, pod: str, grace_s: int = 30) -> None:
        """Deleted by somebody: the operator makes another of its name, at another address."""
        self.admin.call("DELETE", f"{PODS}/{pod}", {"gracePeriodSeconds": grace_s})

    def _run(self) -> None:
        while not self._over.wait(0.02):
            self._reconcile()

    def _reconcile(self) -> None:
        pods = {n: p for n, p in self.pods().items() if MADE in p["metadata"].get("labels", {})}
        wanted = {}
        for mesh in self.admin.items(MESHES):
            name = mesh["metadata"]["name"]
            for ordinal in range(mesh["spec"]["replicas"]):
                wanted[f"{name}-{ordinal}"] = mesh
        for name, mesh in wanted.items():
            if name not in pods:
                self._make(name, mesh)
        for name in sorted(pods, reverse=True):
            pod = pods[name]
            if "deletionTimestamp" in pod["metadata"]:
                # One round later, so that watchers see it leave.
                if name in self._leaving:
                    self._leaving.discard(name)
                    self.lose(name, grace_s=0)
                else:
                    self._leaving.add(name)
            elif name not in wanted:
                self.lose(name)
            elif "podIP" not in pod["status"] and name not in self.scripts:
                status = {"status": ready(self._address(name))}
                self.admin.call("PATCH", f"{PODS}/{name}/status", status)

    def _make(self, name: str, mesh: Object) -> None:
        template = mesh["spec"]["podTemplate"]
        labels = {
            **template["metadata"]["labels"],
            "app.kubernetes.io/name": "monarch-worker",
            MADE: mesh["metadata"]["name"],
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": {**template["spec"], "nodeName": "node-1"},
        }
        self.admin.call("POST", PODS, pod)
        if name in self.scripts:
            self.set(name, self.scripts[name])
