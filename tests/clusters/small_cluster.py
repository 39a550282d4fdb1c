"""What of a cluster no binary here is: the Monarch operator, a scheduler, and a kubelet whose pods
are real processes.

kube-apiserver and kube-controller-manager are real: StatefulSets and Jobs make the pods and roll
them, budgets allow evictions or refuse them, and pods of a node that is silent are taken from it.
Everything runs in the network namespace of this program (10.77.0.1), where pods are linked to one
bridge. Claims are folders, network policies hold nothing back, and no scheduler counts resources.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

from operator_loop import MADE, MESHES, PODS, Admin, not_ready, ready
from pod_container import Object, PodContainer, PodNamespace

SETS = "/apis/apps/v1/namespaces/{space}/statefulsets"
NODES = "/api/v1/nodes"
CAPACITY = {"cpu": "64", "memory": "512Gi", "pods": "110"}
CONTROLLERS = "node-1"  # of pods that no MonarchMesh has


class Kept:
    """A pod that a node runs: its container, and what was last told of it."""

    def __init__(self, net: PodNamespace, container: PodContainer, node: str) -> None:
        self.net, self.container, self.node = net, container, node
        self.kill_at: float | None = None  # once it is told to end
        self.asked_at = 0.0
        self.is_ready = False
        self.told: object = None


class SmallCluster:
    """Nodes that run what the API server's controllers make, until closed."""

    def __init__(self, admin: Admin, server: str, home: Path, nodes: int) -> None:
        self.admin, self._server, self._home = admin, server, home
        self.claims = home / "claims"
        self.dead: set[str] = set()
        self.errors: list[str] = []
        self._nodes = [f"node-{i + 1}" for i in range(nodes)]
        self._ips = (f"10.77.0.{n}" for n in itertools.count(10))
        self._kept: dict[str, Kept] = {}  # by uid
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(work, pause), daemon=True)
            for work, pause in ((self._beat, 1.0), (self._operate, 0.2), (self._keep, 0.2))
        ]

    def __enter__(self) -> SmallCluster:
        for name in self._nodes:
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
            self.admin.call("POST", NODES, node)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        for kept in self._kept.values():
            kept.net.end()

    def pods(self) -> dict[str, Object]:
        return {pod["metadata"]["name"]: pod for pod in self.admin.items(PODS)}

    def node_of(self, pod: str) -> str:
        return str(self.pods()[pod]["spec"]["nodeName"])

    def inside(self, pod: str) -> list[str]:
        """What starts a program in the network of a pod."""
        return self._kept[self.pods()[pod]["metadata"]["uid"]].net.inside

    def logs(self, pod: str) -> str:
        """What the newest pod of that name has written."""
        found = sorted((self._home / "pods").glob(f"{pod}.*"), key=lambda p: p.stat().st_ctime)
        return (found[-1] / "log").read_text(errors="replace") if found else ""

    def lose(self, node: str) -> None:
        """A machine without power: its pods are cut off, and its kubelet says nothing more."""
        self.dead.add(node)
        for kept in list(self._kept.values()):
            if kept.node == node:
                kept.net.cut()

    def _repeat(self, work: Callable[[], None], pause: float) -> None:
        while not self._over.wait(pause):
            try:
                work()
            except Exception as error:  # told to the test, which judges
                self.errors.append(f"{work.__name__}: {error!r:.500}")

    def _beat(self) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        condition = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        told = {**condition, "lastHeartbeatTime": now, "lastTransitionTime": now}
        status = {"capacity": CAPACITY, "allocatable": CAPACITY, "conditions": [told]}
        for name in self._nodes:
            if name not in self.dead:
                self.admin.call("PATCH", f"{NODES}/{name}/status", {"status": status})

    # -- the operator and the scheduler ---------------------------------------------------------

    def _operate(self) -> None:
        """A StatefulSet for each MonarchMesh, as the operator makes it."""
        there = {s["metadata"]["name"]: s for s in self.admin.items(SETS)}
        for mesh in self.admin.items(MESHES):
            name, spec = mesh["metadata"]["name"], mesh["spec"]
            own = {"app.kubernetes.io/name": "monarch-worker", MADE: name}
            template = spec["podTemplate"]
            metadata = {**template["metadata"]}
            metadata["labels"] = {**metadata["labels"], **own}
            body = {
                "replicas": spec["replicas"],
                "template": {"metadata": metadata, "spec": template["spec"]},
            }
            if name not in there:
                fixed = {"serviceName": f"{name}-svc", "podManagementPolicy": "Parallel",
                         "selector": {"matchLabels": own}}  # fmt: skip
                made = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name},
                        "spec": {**body, **fixed}}  # fmt: skip
                self.admin.call("POST", SETS, made)
                continue
            had = there[name]["spec"]
            image = had["template"]["spec"]["containers"][0]["image"]
            if (had["replicas"], image) != (
                spec["replicas"], template["spec"]["containers"][0]["image"]
            ):  # fmt: skip
                self.admin.call("PATCH", f"{SETS}/{name}", {"spec": body})

    def _place(self, raw: Object, found: list[Object]) -> None:
        """Bind a pod to the node that has the fewest; a controller to a node of its own."""
        used = [p["spec"].get("nodeName") for p in found]
        alive = [n for n in self._nodes if n not in self.dead and n != CONTROLLERS]
        worker = MADE in raw["metadata"]["labels"]
        node = min(alive, key=used.count) if worker else CONTROLLERS
        name = raw["metadata"]["name"]
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        self.admin.call("POST", f"{PODS}/{name}/binding", {**binding, "target": target})
        raw["spec"]["nodeName"] = node

    # -- the kubelet ----------------------------------------------------------------------------

    def _keep(self) -> None:
        """Start and end the processes of pods, and tell how they stand."""
        found = self.admin.items(PODS)
        for raw in found:
            uid, node = raw["metadata"]["uid"], raw["spec"].get("nodeName")
            ended = raw["status"].get("phase") in ("Succeeded", "Failed")
            leaving = "deletionTimestamp" in raw["metadata"]
            if node in self.dead or (ended and not leaving):
                continue
            if node is None:
                self._place(raw, found)
            elif leaving:
                self._leave(raw)
            elif uid not in self._kept:
                self._begin(raw, node)
            else:
                self._look(raw, self._kept[uid])
        there = {raw["metadata"]["uid"] for raw in found}
        for uid in set(self._kept) - there:  # the API server has it no more
            self._kept.pop(uid).net.end()

    def _begin(self, raw: Object, node: str) -> None:
        metadata = raw["metadata"]
        home = self._home / "pods" / f"{metadata['name']}.{metadata['uid'][:8]}"
        (home / "top").mkdir(parents=True)
        net = PodNamespace(next(self._ips))
        container = PodContainer(raw, net, home, self.claims, self._read, self._server)
        self._kept[metadata["uid"]] = Kept(net, container, node)

    def _read(self, plural: str, name: str) -> Object:
        path = f"/api/v1/namespaces/{{space}}/{plural}/{name}"
        if plural == "serviceaccounts":  # a token of the account
            ask = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
            found = self.admin.call("POST", path, ask)
        else:
            found = self.admin.call("GET", path)
        assert found is not None, f"{plural} {name}"
        return found

    def _look(self, raw: Object, kept: Kept) -> None:
        """Ask its probes as often as the pod wants, start it again where it ended, and tell."""
        container = kept.container
        code = container.process.poll()
        if code is not None and raw["spec"].get("restartPolicy") == "Never":
            self._tell(raw, kept, _terminated(code))
            kept.net.end()
            return
        if code is not None:
            kept.is_ready = False
            container.start()
        probe = container.probe("readinessProbe")
        if probe and time.monotonic() >= kept.asked_at:
            kept.is_ready = container.passes(probe)
            # More often than is asked for until it is ready, so that tests wait less.
            kept.asked_at = time.monotonic() + (probe["periodSeconds"] if kept.is_ready else 1)
        alive = container.probe("livenessProbe")
        if alive and kept.is_ready and not container.passes(alive):
            container.process.kill()
        ip = kept.net.ip
        status = ready(ip, container.restarts) if kept.is_ready or not probe else not_ready(ip)
        status["containerStatuses"][0]["restartCount"] = container.restarts
        self._tell(raw, kept, status)

    def _leave(self, raw: Object) -> None:
        """SIGTERM, and SIGKILL after the grace; the object goes once the process has."""
        name, uid = raw["metadata"]["name"], raw["metadata"]["uid"]
        kept = self._kept.get(uid)
        if kept is not None:
            code = kept.container.process.poll()
            if kept.kill_at is None and code is None:
                grace_s = raw["metadata"].get("deletionGracePeriodSeconds", 30)
                kept.kill_at = time.monotonic() + grace_s
                kept.container.process.terminate()
            if code is None:
                if kept.kill_at is not None and time.monotonic() > kept.kill_at:
                    kept.container.process.kill()
                return
            if raw["status"].get("phase") not in ("Succeeded", "Failed"):
                self._tell(raw, kept, _terminated(code))
        gone = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
        self.admin.call("DELETE", f"{PODS}/{name}", gone)

    def _tell(self, raw: Object, kept: Kept, status: Object) -> None:
        if kept.told == status:
            return
        container = {**status["containerStatuses"][0]}
        container["name"] = raw["spec"]["containers"][0]["name"]
        kinds = {c["type"] for c in status["conditions"]}
        others = [c for c in raw["status"].get("conditions", ()) if c["type"] not in kinds]
        whole = {**status, "containerStatuses": [container]}
        whole["conditions"] = [*others, *status["conditions"]]
        path = f"{PODS}/{raw['metadata']['name']}/status"
        self.admin.call("PATCH", path, {"status": whole})
        kept.told = status


def _terminated(code: int) -> Object:
    """The status of a pod whose container has ended; by a signal as 128 and its number."""
    code = 128 - code if code < 0 else code
    ended = {"exitCode": code, "reason": "Error" if code else "Completed"}
    container = {
        "name": "worker", "image": "x", "imageID": "", "ready": False, "restartCount": 0,
        "state": {"terminated": ended},
    }  # fmt: skip
    return {
        "phase": "Failed" if code else "Succeeded",
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [container],
    }
