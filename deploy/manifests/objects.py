"""Build the parts of every manifest: names, labels, resources, and the one form of a pod.

    labels("three-channels", "generator")  ->  app.kubernetes.io/{part-of,instance,component,...}

Objects are plain dicts with Kubernetes' field names. Nothing here reads a file or a clock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]

DOMAIN = "app.kubernetes.io"
PART_OF = "cartridge-forge"
IMAGE = "cartridge-forge:0.1.0"  # an overlay adds -cpu or -cuda: the targets of the Dockerfile
HOME = "/app"  # where the Dockerfile puts the repository
USER = 10001  # the Dockerfile's user
WORKER_PORT = 26600  # Monarch's own default
HELLO_PORT = WORKER_PORT + 1  # where a worker serves its WorkerInfo over HTTP
GPU = "nvidia.com/gpu"
MONARCH_API = "monarch.pytorch.org/v1alpha1"
SECRETS = "cartridge-forge/secrets"  # annotation of a namespace: the Secrets that it needs
MONITORING_NAMESPACE = "monitoring"
POD_MONITOR_API = "monitoring.coreos.com/v1"
METRICS_EVERY = "5s"


@dataclass(frozen=True)
class Resources:
    """Hold a container's resources: `Resources(cpu=2, memory=3, shm=1)`; memory and shm in GiB.
    Pages of /dev/shm count as the container's memory, so `memory` includes them."""

    cpu: int
    memory: int
    shm: int
    gpus: int = 0

    def as_dict(self) -> Object:
        """Return requests equal to limits: such a pod is evicted last, and GPUs require it."""
        amounts = {"cpu": str(self.cpu), "memory": f"{self.memory}Gi"}
        if self.gpus:
            amounts[GPU] = str(self.gpus)
        return {"requests": amounts, "limits": dict(amounts)}


def dashed(name: str) -> str:
    """Return a name as part of a DNS label: `"doc_teacher"` -> `"doc-teacher"`."""
    return re.sub("[^a-z0-9]+", "-", name.lower())[:50].strip("-")


def mesh_name(role: str) -> str:
    """Return a role as a MonarchMesh may be named: `"doc_teacher"` -> `"docteacher"`."""
    return role.replace("_", "")


def labels(instance: str, component: str | None = None) -> dict[str, str]:
    """Return the labels of all objects of one mesh, or of one component of it."""
    common = {f"{DOMAIN}/part-of": PART_OF, f"{DOMAIN}/instance": instance}
    return common if component is None else {**common, f"{DOMAIN}/component": component}


def made(
    api: str,
    kind: str,
    name: str,
    namespace: str | None,
    labelled: Mapping[str, str],
    **fields: Any,
) -> Object:
    """Return an object with its metadata first."""
    metadata: Object = {"name": name}
    if namespace is not None:
        metadata["namespace"] = namespace
    metadata["labels"] = {**labelled, f"{DOMAIN}/managed-by": "forge-k8s"}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **fields}


def namespace(name: str, instance: str, secrets: Mapping[str, Sequence[str]]) -> Object:
    """Return the namespace, under the restricted Pod Security Standard. `secrets` maps the name of
    each Secret that must be created there by hand to its keys."""
    made_by_hand = "; ".join(f"{name}: {' '.join(keys)}" for name, keys in secrets.items())
    found = made("v1", "Namespace", name, None, labels(instance))
    found["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] = "restricted"
    if made_by_hand:
        found["metadata"]["annotations"] = {SECRETS: made_by_hand}
    return found


def settings(*values: str) -> list[str]:
    """Return overrides as arguments: `settings("hosts=slurm")` -> `["--set", "hosts=slurm"]`."""
    return [word for value in values for word in ("--set", value)]


def secret_env(variable: str, secret: str, key: str) -> Object:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def pod(
    name: str,
    command: Sequence[str],
    resources: Resources,
    account: str,
    labelled: Mapping[str, str],
    *,
    ports: Mapping[str, int],
    probes: Mapping[str, Object],
    env: Sequence[Object] = (),
    volumes: Sequence[Object] = (),
    mounts: Sequence[Object] = (),
    api_token: bool = False,
    grace_s: int = 30,
) -> Object:
    """Return a pod template of one container, without root or capabilities. Only /tmp, /dev/shm and
    what `mounts` adds are writable."""
    shm = f"{resources.shm}Gi"
    container: Object = {
        "name": name,
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["tini", "--", *command],  # as process 1 a worker would ignore SIGTERM
        "workingDir": HOME,
        # The root file system is read-only: libraries' files in HOME go to /tmp.
        "env": [{"name": "HOME", "value": "/tmp"}, *env],
        "ports": [{"name": n, "containerPort": p, "protocol": "TCP"} for n, p in ports.items()],
        **probes,
        "resources": resources.as_dict(),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
            *mounts,
        ],
    }
    return {
        "metadata": {"labels": dict(labelled)},
        "spec": {
            "serviceAccountName": account,
            "automountServiceAccountToken": api_token,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": grace_s,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [
                {"name": "tmp", "emptyDir": {"sizeLimit": "4Gi"}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm}},
                *volumes,
            ],
        },
    }


def policy(
    name: str,
    space: str,
    labelled: Mapping[str, str],
    selector: Mapping[str, str],
    *,
    ingress: Sequence[Object] | None = None,
    egress: Sequence[Object] | None = None,
) -> Object:
    """Return a NetworkPolicy for `selector`'s pods; a direction given allows only its rules."""
    rules = {"ingress": ingress, "egress": egress}
    given = {key: list(value) for key, value in rules.items() if value is not None}
    spec: Object = {"podSelector": {"matchLabels": dict(selector)} if selector else {}}
    spec["policyTypes"] = [key.capitalize() for key in given]
    spec |= {key: value for key, value in given.items() if value}
    return made("networking.k8s.io/v1", "NetworkPolicy", name, space, labelled, spec=spec)


def budget(name: str, space: str, labelled: Mapping[str, str], **allowed: int) -> Object:
    """Return a PodDisruptionBudget for `labelled` pods: `maxUnavailable=1` or `minAvailable=1`."""
    spec = {**allowed, "selector": {"matchLabels": dict(labelled)}}
    return made("policy/v1", "PodDisruptionBudget", name, space, labelled, spec=spec)


def claim(name: str, space: str, labelled: Mapping[str, str], mode: str, size: str) -> Object:
    """Return a PersistentVolumeClaim of access mode `mode`."""
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": size}}}
    return made("v1", "PersistentVolumeClaim", name, space, labelled, spec=spec)


def tcp(*ports: int) -> list[Object]:
    return [{"protocol": "TCP", "port": port} for port in ports]


def from_namespace(label: str, value: str) -> Object:
    """Return a NetworkPolicy peer: the pods of namespaces with this label."""
    return {"namespaceSelector": {"matchLabels": {label: value}}}


def from_monitoring() -> Object:
    return from_namespace("kubernetes.io/metadata.name", MONITORING_NAMESPACE)


def pod_monitor(
    name: str,
    space: str,
    labelled: Mapping[str, str],
    selector: Mapping[str, str],
    port: str,
    **way: Any,
) -> Object:
    """Return a PodMonitor that scrapes /metrics of the pods of `selector`; `way` extends its
    endpoint."""
    end = {"port": port, "path": "/metrics", "interval": METRICS_EVERY, **way}
    body = {"selector": {"matchLabels": dict(selector)}, "podMetricsEndpoints": [end]}
    return made(POD_MONITOR_API, "PodMonitor", name, space, labelled, spec=body)
