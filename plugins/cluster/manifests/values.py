"""Fit rendered objects to a cluster: image, registry, namespace, storage class, queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cartridge_forge.plugins.cluster.manifests.devices import GB, QUEUE, process_bytes
from cartridge_forge.plugins.cluster.manifests.objects import GPU, IMAGE, Object, Scope
from cartridge_forge.plugins.cluster.manifests.sizing import GIB, ModelSize, runs_bytes
from cartridge_forge.plugins.cluster.spec import DeploymentSpec, GpuClassSpec
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.mesh import MODEL_ROLES, RunSpec

KEDA_API = "keda.sh/v1alpha1"
LEAST_RUNS_GIB = 20  # rows, traces and reports beside the checkpoints


def image_of(values: DeploymentSpec, target: str = "") -> str:
    """Return the image of a Dockerfile's target: `"cartridge-forge:0.1.0-cpu"` of "cpu"."""
    image = values.image
    if image.digest is not None:
        return f"{image.repository}@{image.digest}"
    return f"{image.repository}:{image.tag}{f'-{target}' if target else ''}"


def fitted(parts: Sequence[Object], values: DeploymentSpec, scope: Scope) -> list[Object]:
    """Return the objects of a file, changed in place: those of a scope, for a cluster."""
    for item in parts:
        _move(item, scope.namespace, values.namespace)
        spec = item.get("spec") or {}
        if item["kind"] == "PersistentVolumeClaim" and values.storage.class_name is not None:
            spec["storageClassName"] = values.storage.class_name
        if item["kind"] in ("MonarchMesh", "Job") and values.queue is not None:
            item["metadata"]["labels"][QUEUE] = values.queue
        if item["kind"] == "HorizontalPodAutoscaler" and values.keda is not None:
            _scale_by_keda(item, values.keda)
        for pod in _pod_specs(spec):
            if values.image.pull_secret is not None:
                pod["imagePullSecrets"] = [{"name": values.image.pull_secret}]
            for container in [*pod.get("initContainers", ()), *pod["containers"]]:
                if container["image"] == IMAGE:
                    container["image"] = image_of(values)
    return list(parts)


def _scale_by_keda(scaler: Object, prometheus: str) -> None:
    """Turn an autoscaler into KEDA's, by the same metric: KEDA makes the autoscaler, and asks
    Prometheus itself, so that no adapter of custom metrics is needed."""
    spec, space = scaler["spec"], scaler["metadata"]["namespace"]
    (metric,) = (m["pods"] for m in spec["metrics"])
    trigger = {
        "serverAddress": prometheus,
        "query": f'sum({metric["metric"]["name"]}{{namespace="{space}"}})',
        "threshold": metric["target"]["averageValue"],
    }
    scaler["apiVersion"], scaler["kind"] = KEDA_API, "ScaledObject"
    scaler["spec"] = {
        "scaleTargetRef": spec["scaleTargetRef"],
        "minReplicaCount": spec["minReplicas"],
        "maxReplicaCount": spec["maxReplicas"],
        "triggers": [{"type": "prometheus", "metadata": trigger}],
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": spec["behavior"]}},
    }


def _move(item: Object, old: str, new: str | None) -> None:
    metadata = item["metadata"]
    if new is None:
        return
    if item["kind"] == "Namespace":
        metadata["name"] = new
    elif metadata.get("namespace") == old:
        metadata["namespace"] = new
    for subject in item.get("subjects", ()):
        subject["namespace"] = new
    for pod in _pod_specs(item.get("spec") or {}):
        for container in pod["containers"]:  # names that the HTTP server is known by
            container["command"] = [w.replace(f".{old}", f".{new}") for w in container["command"]]


def _pod_specs(spec: Any) -> Iterator[Any]:
    inner = spec.get("jobTemplate", {}).get("spec", spec)
    for key in ("template", "podTemplate"):
        if key in inner and "containers" in inner[key].get("spec", {}):
            yield inner[key]["spec"]


def on_gpu_nodes(gpu: GpuClassSpec) -> Object:
    """Return the fields of a pod's spec that place it on nodes of a class of GPU."""
    product = {} if gpu.product is None else {f"{GPU}.product": gpu.product}
    tolerations = [t.model_dump(exclude_none=True) for t in gpu.tolerations]
    fields = {"nodeSelector": {**product, **gpu.node_labels}, "tolerations": tolerations}
    return {key: value for key, value in fields.items() if value}


def require_fit(spec: RunSpec, size: ModelSize, gpu: GpuClassSpec) -> None:
    """Raise SpecError for roles that need more of one GPU than its class has."""
    gb_needed = {
        name: process_bytes(spec, name, size) / GB for name, _ in spec.roles if name in MODEL_ROLES
    }
    excess = {name: need for name, need in gb_needed.items() if need > gpu.gb}
    if excess:
        listing = ", ".join(f"{name} {need:.1f} GB" for name, need in excess.items())
        raise SpecError(
            f"gpu.gb: a process needs more of one GPU than its {gpu.gb:g} GB: {listing}; give a "
            "larger class in --values, or lower what the plan counts (forge plan --sizing), such "
            "as objective.micro_tokens"
        )


def require_server(values: DeploymentSpec) -> None:
    """Raise SpecError for values that only a mesh can have."""
    for key, value in (("gang", values.gang), ("rdma", values.rdma)):
        if value:
            raise SpecError(
                f"{key}: a server has one kind of pod and no tensor plane; leave it out of --values"
            )


def runs_gib(spec: RunSpec, size: ModelSize, values: DeploymentSpec | None = None) -> int:
    """Return the GiB of the claim of runs: what the plan writes, or what is asked for. Raises
    SpecError where that is less."""
    planned = -(-runs_bytes(RsaLearn.of(spec.learn), size) // GIB)
    gib = None if values is None else values.storage.runs_gib
    if gib is None:
        return max(LEAST_RUNS_GIB, planned)
    if gib < planned:
        raise SpecError(
            f"storage.runs_gib: must be >= {planned}, which the plan writes in checkpoints and its "
            f"last state (got {gib}); raise it, or lower train.keep_checkpoints"
        )
    return gib
