"""Configure clusters: `hosts.kubernetes` and `hosts.slurm` of `meshes/*.yaml`, and the manifests of
a cluster, `deploy/values.yaml`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.plugins.spec_files.keys import SpecFile
from cartridge_forge.protocols.spec.base import (
    PATTERN_RULES,
    AsTuple,
    ReadWith,
    SpecSection,
    broken,
)
from cartridge_forge.protocols.spec.mesh import HostsSpec, MeshSpec

_WORD = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_HOST = r"[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?"
_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_SUBDOMAIN = rf"{_WORD}(\.{_WORD})*"
_LABEL_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
# A first part is a registry where it has a dot or a port, or is localhost.
_REGISTRY = rf"({_HOST}(\.{_HOST})+(:[0-9]+)?|{_HOST}:[0-9]+|localhost|\[[0-9a-fA-F:]+\](:[0-9]+)?)"
_REPOSITORY = rf"({_REGISTRY}/)?{_PART}(/{_PART})*"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_DIGEST = r"sha256:[0-9a-f]{64}"

LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"  # RFC 1123: a namespace, a container
SUBDOMAIN = rf"^{_SUBDOMAIN}$"  # most objects; at most SUBDOMAIN_LENGTH characters
SUBDOMAIN_LENGTH = 253
LABEL_KEY = rf"^({_SUBDOMAIN}/)?{_LABEL_NAME}$"  # of labels, taints, annotations
LABEL_VALUE = rf"^({_LABEL_NAME})?$"
LABEL_LENGTH = 63
REPOSITORY = rf"^{_REPOSITORY}$"
TAG = rf"^{_TAG}$"
DIGEST = rf"^{_DIGEST}$"
EXTENDED_RESOURCE = rf"^{_SUBDOMAIN}/{_LABEL_NAME}$"  # of a device plugin

# What each asks for: (rule, remedy), as errors of a spec say it.
PATTERN_RULES |= {
    LABEL: (
        "must be at most 63 lower-case letters, digits and -, a letter or digit at both ends",
        "rename it",
    ),
    SUBDOMAIN: (
        "must be the name of a Kubernetes object: lower-case letters, digits, - and ., a letter or "
        "digit at both ends",
        "give the object's name as `kubectl get` prints it",
    ),
    LABEL_KEY: (
        "must be a label's key: [prefix/]name of letters, digits, -, _ and .",
        "copy it from the nodes' labels or taints",
    ),
    LABEL_VALUE: (
        "must be a label's value: at most 63 letters, digits, -, _ and ., no spaces",
        "copy it from `kubectl get nodes --show-labels`",
    ),
    REPOSITORY: (
        "must be an image without tag or digest: registry.example.com/team/forge",
        "give those as image.tag and image.digest",
    ),
    TAG: ("must be a tag: letters, digits, _, . and -", "copy it from the registry"),
    DIGEST: ("must be sha256: and 64 hexadecimal digits", "copy it from the registry"),
    EXTENDED_RESOURCE: (
        "must be a resource of a device plugin: domain/name",
        "copy it from `kubectl describe node`",
    ),
}


ObjectName = Annotated[str, Field(pattern=SUBDOMAIN, max_length=SUBDOMAIN_LENGTH)]
QueueName = Annotated[str, Field(pattern=SUBDOMAIN, max_length=LABEL_LENGTH)]  # a label's value too
LabelKey = Annotated[str, Field(pattern=LABEL_KEY)]
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE)]


def pod_host(ip: str, namespace: str) -> str:
    """Return the name that the cluster's DNS has for a pod's address: in namespace `"forge-x"`
    `"10.0.0.7"` is `"10-0-0-7.forge-x.pod"`. One certificate for `*.forge-x.pod` fits every pod
    there."""
    return f"{re.sub('[.:]', '-', ip.strip('[]'))}.{namespace}.pod"


class KubernetesSpec(SpecSection):
    """Configure pods of MonarchMeshes, one MonarchMesh for each role."""

    namespace: str | None = Field(
        default=None, description="where the pods are; null: forge- and the mesh's name"
    )
    context: str | None = Field(
        default=None, description="of the kubeconfig, outside a pod; null: its current one"
    )
    provision: bool = Field(
        default=False, description="make the MonarchMeshes, and delete them at the end"
    )
    image: str = Field(
        default="cartridge-forge:0.1.0-cpu", min_length=1, description="of provisioned pods"
    )


class SlurmSpec(SpecSection):
    """Configure one Slurm job, submitted for the run and cancelled at its end."""

    nodes: int = Field(default=1, ge=1, description="one worker each; all roles share them")
    partition: str | None = Field(default=None, description="null: the cluster's default")
    account: str | None = Field(default=None, description="null: the cluster's default")
    time_limit: str | None = Field(default=None, description="HH:MM:SS; null: the default")
    gpus_per_node: int | None = Field(default=None, ge=1, description="null: none are asked for")
    args: Annotated[tuple[str, ...], AsTuple] = Field(
        default=(), description="further options of sbatch, such as --qos=high"
    )
    start_timeout_s: float = Field(
        default=600.0, gt=0, description="most seconds in the queue, before the run fails"
    )


class ClusterHosts(HostsSpec):
    """Add pods and nodes of a job to `hosts`."""

    kubernetes: Annotated[KubernetesSpec | None, ReadWith("kind", ("kubernetes",))] = Field(
        default=None, description="pods of MonarchMeshes"
    )
    slurm: Annotated[SlurmSpec | None, ReadWith("kind", ("slurm",))] = Field(
        default=None, description="nodes of a job"
    )


class ClusterMesh(MeshSpec):
    """Add the hosts of clusters to a mesh."""

    hosts: ClusterHosts = Field(
        default=ClusterHosts(), description="where the roles run; a bare word is a kind"
    )


class ImageSpec(SpecSection):
    """Configure the image of every pod."""

    repository: str = Field(
        default="cartridge-forge",
        pattern=REPOSITORY,
        max_length=255,
        description="the image without its tag, with its registry: registry.example.com/team/forge",
    )
    tag: str = Field(
        default="0.1.0",
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}$",
        description="its tag; overlays add -cpu or -cuda, the targets of the Dockerfile",
    )
    digest: Annotated[str, Field(pattern=DIGEST)] | None = Field(
        default=None, description="sha256:... of one image for every overlay, in place of the tag"
    )
    pull_secret: ObjectName | None = Field(
        default=None, description="Secret with the registry's credentials; null: none is needed"
    )

    @field_validator("tag")
    @classmethod
    def _is_a_version(cls, value: str) -> str:
        if value == "latest":
            raise broken("must name a version; what latest is changes", "give the release's tag")
        return value


class TolerationSpec(SpecSection):
    """Configure a taint that the pods on GPUs tolerate."""

    key: LabelKey = Field(description="the taint's key")
    operator: Literal["Exists", "Equal"] = Field(
        default="Exists", description="Exists: any value; Equal: this one"
    )
    value: LabelValue | None = Field(default=None, description="with operator Equal")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default="NoSchedule", description="the taint's effect; null: all"
    )

    @field_validator("value")
    @classmethod
    def _is_of_equal(cls, value: str | None, info: ValidationInfo) -> str | None:
        if (info.data.get("operator") == "Equal") != (value is not None):
            raise broken("must be given with operator Equal, and only there", "add or remove it")
        return value


class GpuClassSpec(SpecSection):
    """Configure the class of GPU that the pods with a model are placed on."""

    product: LabelValue | None = Field(
        default="NVIDIA-H100-80GB-HBM3",
        description="the nodes' label nvidia.com/gpu.product; null: no such label is asked for",
    )
    gb: float = Field(
        default=80.0, gt=0, description="memory of one GPU, GB (10^9 bytes), that the plan must fit"
    )
    node_labels: dict[LabelKey, LabelValue] = Field(
        default={}, description="further labels of the nodes (nodeSelector)"
    )
    tolerations: Annotated[tuple[TolerationSpec, ...], AsTuple] = Field(
        default=(TolerationSpec(key="nvidia.com/gpu"),), description="taints of these nodes"
    )


class StorageSpec(SpecSection):
    """Configure the claims."""

    class_name: ObjectName | None = Field(
        default=None, description="storage class of every claim; null: the cluster's default"
    )
    runs_gib: int | None = Field(
        default=None,
        ge=1,
        description="GiB of the claim of runs; null: what the plan writes, and at least 20. Less "
        "than the plan's is refused",
    )


class ModelSourceSpec(SpecSection):
    """Configure where the pods find the base model."""

    claim: ObjectName | None = Field(
        default=None,
        description="a claim of yours that has it, mounted read-only; null: the image has it, or, "
        "for a model of the hub, a claim is made and filled once by a Job",
    )
    path: str | None = Field(default=None, description="its folder in that claim")
    token_secret: ObjectName | None = Field(
        default=None, description="Secret whose key HF_TOKEN the Job uses; null: it needs none"
    )

    @field_validator("path")
    @classmethod
    def _is_in_the_claim(cls, value: str | None, info: ValidationInfo) -> str | None:
        if (info.data.get("claim") is None) != (value is None):
            raise broken("must be given with model.claim, and only there", "add or remove it")
        if value is not None and (value.startswith("/") or ".." in value.split("/")):
            raise broken("must be a folder in the claim", "write it without / at the front or ..")
        return value


class RdmaSpec(SpecSection):
    """Configure the RDMA devices of the pods between which tensors go."""

    resource: str = Field(
        pattern=EXTENDED_RESOURCE,
        description="what the cluster's device plugin offers: rdma/hca_shared_devices_a",
    )
    count: int = Field(default=1, ge=1, description="devices of a pod")


class DeploymentSpec(SpecSection):
    """Configure the manifests of a cluster, `deploy/values.yaml`."""

    namespace: str | None = Field(
        default=None,
        pattern=LABEL,
        description="of every object; null: forge- and the mesh's name",
    )
    image: ImageSpec = Field(default=ImageSpec(), description="the image of every pod")
    gpu: GpuClassSpec = Field(
        default=GpuClassSpec(), description="nodes of the pods with a model, in overlays/gpu"
    )
    storage: StorageSpec = Field(default=StorageSpec(), description="the claims")
    model: ModelSourceSpec = Field(
        default=ModelSourceSpec(), description="where the base model comes from"
    )
    queue: QueueName | None = Field(
        default=None, description="Kueue's queue for MonarchMeshes and Jobs; null: none"
    )
    gang: bool = Field(
        default=False,
        description="the queue admits all workers of a mesh together or none, as one pod group of "
        "Kueue; the mesh then cannot be scaled",
    )
    rdma: RdmaSpec | None = Field(
        default=None,
        description="devices of the pods with a model, and of the controller, in overlays/gpu; "
        "where a plugin of the cluster offers them. null: tensors go by TCP",
    )
    keda: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$",
        description="address of the Prometheus by which KEDA adds servers, such as "
        "http://prometheus.monitoring:9090; null: a HorizontalPodAutoscaler does",
    )
    certificates: ObjectName | None = Field(
        default=None,
        description="Secret with ca.crt, tls.crt and tls.key of the control plane, such as "
        "cert-manager makes; null: they are in forge-control, beside the token",
    )

    @field_validator("gang")
    @classmethod
    def _has_a_queue(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("queue") is None:
            raise broken("must be given with queue", "name Kueue's queue, or leave gang out")
        return value


DEPLOYMENT_FILE = SpecFile(
    DeploymentSpec,
    "a deployment",
    "deploy/values.yaml",
    "render with forge k8s render MESH.yaml --values {}",
)
