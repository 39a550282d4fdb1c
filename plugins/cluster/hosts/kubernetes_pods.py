"""Turn pods as the API server returns them into workers to attach to, or into messages.

    raw pod -> Pod -> HostWorker("generator-0", "tcp://10.0.0.7:26600", "generator", 1)
                   -> "generator-1: Unschedulable: 0/3 nodes are available; add nodes or ..."

All functions are pure: nothing here calls the API server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cartridge_forge.plugins.cluster.manifests.objects import (
    DOMAIN,
    PART_OF,
    WORKER_PORT,
    dashed,
    mesh_name,
)
from cartridge_forge.plugins.cluster.spec import pod_host
from cartridge_forge.services.pool.hosts import HostWorker

Incarnation = tuple[str, int]

REMEDIES = {
    "Unschedulable": "add nodes, or ask for less in the mesh file",
    "ErrImagePull": "push the image to where the nodes find it, or correct its name",
    "ImagePullBackOff": "push the image to where the nodes find it, or correct its name",
    "InvalidImageName": "correct the image's name",
    "CreateContainerConfigError": "make the Secret or ConfigMap that it names",
    "NodeLost": "if its node does not come back, delete the Node, or the pod with --force: no "
    "other is made before that",
    "CrashLoopBackOff": "read `kubectl logs -n {space} {pod} --previous`",
}


@dataclass(frozen=True)
class Pod:
    """Describe a pod: `Pod("generator-0", "5f1c", "generator", "10.0.0.7", 0, runs=True,
    ready=True)`.

    component  from the label: a role with dashes
    restarts   of its container, by kubelet: the address stays and the worker is another
    runs       its container runs, and the pod is not being deleted
    reason     why it is not ready, in Kubernetes' words; "" where it is
    """

    name: str
    uid: str
    component: str
    ip: str
    restarts: int
    runs: bool
    ready: bool
    reason: str = ""
    message: str = ""

    @property
    def incarnation(self) -> Incarnation:
        return self.uid, self.restarts

    @property
    def ordinal(self) -> int:
        """Return its index in its StatefulSet, which removes the highest first."""
        number = self.name.rpartition("-")[2]
        return int(number) if number.isdecimal() else 0


def selector(instance: str, roles: Iterable[str]) -> str:
    """Return the label selector of the pods of these roles, by the labels of the manifests."""
    components = ",".join(dashed(role) for role in roles)
    return (
        f"{DOMAIN}/part-of={PART_OF},{DOMAIN}/instance={instance},"
        f"{DOMAIN}/component in ({components})"
    )


def pod_of(raw: Mapping[str, Any]) -> Pod:
    """Return the fields of a raw pod that this module uses."""
    metadata, status = raw["metadata"], raw.get("status", {})
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    containers = status.get("containerStatuses") or ()
    leaving = "deletionTimestamp" in metadata
    runs = (
        status.get("phase") == "Running"
        and not leaving
        and all("running" in c.get("state", {}) for c in containers)
    )
    ready = runs and conditions.get("Ready", {}).get("status") == "True"
    reason, message = ("", "") if ready else _why(status, conditions, leaving)
    return Pod(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        component=metadata.get("labels", {}).get(f"{DOMAIN}/component", ""),
        ip=status.get("podIP") or "",
        restarts=sum(c.get("restartCount", 0) for c in containers),
        runs=runs,
        ready=ready,
        reason=reason,
        message=message,
    )


def _why(
    status: Mapping[str, Any], conditions: Mapping[str, Any], leaving: bool
) -> tuple[str, str]:
    """Return (reason, message) of a pod that is not ready."""
    if leaving:
        # Of a silent node the pod stays, since nobody tells that its container has ended.
        condition = conditions.get("DisruptionTarget", {})
        lost = condition.get("reason") == "DeletionByTaintManager"
        return ("NodeLost", condition.get("message", "")) if lost else ("Terminating", "")
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return scheduled.get("reason", "Unschedulable"), scheduled.get("message", "")
    every = [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]
    for container in every:
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in (None, "PodInitializing"):
            messages = [waiting.get("message", ""), _ended(container.get("lastState", {}))]
            return waiting["reason"], "; ".join(filter(None, messages))
        if ended := _ended(container.get("state", {})):
            return "Terminated", ended
    if status.get("phase") == "Running":
        return "NotReady", "its readiness probe has not passed"
    return status.get("reason") or status.get("phase", "Pending"), status.get("message", "")


def _ended(state: Mapping[str, Any]) -> str:
    end = state.get("terminated")
    return f"ended with exit code {end.get('exitCode')} ({end.get('reason')})" if end else ""


def attachable(pods: Iterable[Pod], previous: frozenset[Incarnation]) -> frozenset[Incarnation]:
    """Return the (uid, restarts) of pods to attach to: those that run, and are ready or were
    `previous`.

    A probe that fails for a while on a busy node ends no replica; only missing heartbeats do.
    """
    running = (p for p in pods if p.runs and p.ip)
    return frozenset(p.incarnation for p in running if p.ready or p.incarnation in previous)


def workers(
    pods: Iterable[Pod], attached: frozenset[Incarnation], roles: Iterable[str], space: str = ""
) -> tuple[HostWorker, ...]:
    """Return the workers of `attached` in the order of `roles`, then by ordinal. They talk TLS
    where `space` names their namespace."""
    order = {dashed(role): (index, role) for index, role in enumerate(roles)}
    chosen = [p for p in pods if p.incarnation in attached and p.component in order]
    chosen.sort(key=lambda p: (order[p.component][0], p.ordinal, p.name))
    return tuple(
        HostWorker(p.name, address(p.ip, space), order[p.component][1], capacity=1) for p in chosen
    )


def address(ip: str, space: str = "") -> str:
    """Return `"tcp://10.0.0.7:26600"` for `"10.0.0.7"`; IPv6 in brackets. By IP, because the next
    pod has the same name. With a namespace, the address for TLS by the name that the IP has."""
    if space:
        return f"tls://{pod_host(ip, space)}:{WORKER_PORT}"
    host = f"[{ip}]" if ":" in ip else ip
    return f"tcp://{host}:{WORKER_PORT}"


def missing(pods: Iterable[Pod], wanted: Mapping[str, int], space: str) -> list[str]:
    """Return a line for each wanted pod (role to replicas) that is not ready: name, reason, remedy.
    Empty where none is missing."""
    lines = []
    pod_list = list(pods)
    for role, replicas in wanted.items():
        mine = {p.name: p for p in pod_list if p.component == dashed(role)}
        if sum(p.ready for p in mine.values()) >= replicas:
            continue
        if not mine:
            lines.append(f"{mesh_name(role)}: no pods")
            continue
        short = replicas - len(mine)
        lines += [_lacks(p, space) for _, p in sorted(mine.items()) if not p.ready]
        if short > 0:
            lines.append(f"{mesh_name(role)}: {short} of {replicas} pods are not made yet")
    return lines


def _lacks(pod: Pod, space: str) -> str:
    text = f"{pod.name}: {pod.reason}" + (f": {pod.message:.300}" if pod.message else "")
    remedy = REMEDIES.get(pod.reason)
    return text + (f"; {remedy.format(space=space, pod=pod.name)}" if remedy else "")
