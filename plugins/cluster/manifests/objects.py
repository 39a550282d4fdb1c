"""Build the parts of every manifest: names, labels, resources, and the one form of a pod.

    Scope("three-channels", "generator").labels  ->  app.kubernetes.io/{part-of,instance,component}

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
ONE_NODE = "cartridge-forge/one-node"  # annotation of a claim: all its pods are on one node
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


@dataclass(frozen=True)
class Scope:
    """Make the objects of a mesh or a server, or of one component of it: `Scope("longhealth",
    "controller")`. All are in its namespace, and carry its labels."""

    instance: str
    component: str | None = None

    def of(self, component: str) -> Scope:
        """Return the scope of one component."""
        return Scope(self.instance, component)

    @property
    def namespace(self) -> str:
        return f"forge-{self.instance}"

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels by which the objects are selected."""
        common = {f"{DOMAIN}/part-of": PART_OF, f"{DOMAIN}/instance": self.instance}
        component = {} if self.component is None else {f"{DOMAIN}/component": self.component}
        return {**common, **component}

    def made(self, api: str, kind: str, name: str, **fields: Any) -> Object:
        """Return an object with its metadata first."""
        labelled = {**self.labels, f"{DOMAIN}/managed-by": "forge-k8s"}
        metadata = {"name": name, "namespace": self.namespace, "labels": labelled}
        return {"apiVersion": api, "kind": kind, "metadata": metadata, **fields}

    def made_namespace(self, secrets: Mapping[str, Sequence[str]]) -> Object:
        """Return the namespace, under the restricted Pod Security Standard. `secrets` maps the name
        of each Secret that must be created there by hand to its keys."""
        namespace = Scope(self.instance).made("v1", "Namespace", self.namespace)
        metadata = namespace["metadata"]
        del metadata["namespace"]
        metadata["labels"]["pod-security.kubernetes.io/enforce"] = "restricted"
        by_hand = "; ".join(f"{name}: {' '.join(keys)}" for name, keys in secrets.items())
        metadata |= {"annotations": {SECRETS: by_hand}} if by_hand else {}
        return namespace

    def policy(
        self,
        name: str,
        selector: Mapping[str, str],
        *,
        ingress: Sequence[Object] | None = None,
        egress: Sequence[Object] | None = None,
    ) -> Object:
        """Return a NetworkPolicy for `selector`'s pods; a direction given allows only its rules."""
        rules = {"ingress": ingress, "egress": egress}
        rule_lists = {key: list(value) for key, value in rules.items() if value is not None}
        spec: Object = {"podSelector": {"matchLabels": dict(selector)} if selector else {}}
        spec["policyTypes"] = [key.capitalize() for key in rule_lists]
        spec |= {key: value for key, value in rule_lists.items() if value}
        return self.made("networking.k8s.io/v1", "NetworkPolicy", name, spec=spec)

    def budget(self, name: str, **allowed: int) -> Object:
        """Return a PodDisruptionBudget for the pods: `maxUnavailable=1` or `minAvailable=1`."""
        spec = {**allowed, "selector": {"matchLabels": self.labels}}
        return self.made("policy/v1", "PodDisruptionBudget", name, spec=spec)

    def claim(self, name: str, mode: str, size: str) -> Object:
        """Return a PersistentVolumeClaim of access mode `mode`."""
        spec = {"accessModes": [mode], "resources": {"requests": {"storage": size}}}
        return self.made("v1", "PersistentVolumeClaim", name, spec=spec)

    def pod_monitor(
        self, name: str, selector: Mapping[str, str], port: str, **endpoint: Any
    ) -> Object:
        """Return a PodMonitor that scrapes /metrics of the pods of `selector`; `endpoint` are
        further fields of its endpoint."""
        end = {"port": port, "path": "/metrics", "interval": METRICS_EVERY, **endpoint}
        body = {"selector": {"matchLabels": dict(selector)}, "podMetricsEndpoints": [end]}
        return self.made(POD_MONITOR_API, "PodMonitor", name, spec=body)


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


def tcp(*ports: int) -> list[Object]:
    return [{"protocol": "TCP", "port": port} for port in ports]


def from_namespace(label: str, value: str) -> Object:
    """Return a NetworkPolicy peer: the pods of namespaces with this label."""
    return {"namespaceSelector": {"matchLabels": {label: value}}}


def from_monitoring() -> Object:
    return from_namespace("kubernetes.io/metadata.name", MONITORING_NAMESPACE)
