"""Configure a cluster's manifests: `forge k8s render MESH.yaml --values FILE`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from protocols.spec.base import AsTuple, SpecSection, broken


class ImageSpec(SpecSection):
    """Configure the image of every pod."""

    repository: str = Field(
        default="cartridge-forge",
        pattern=r"^[a-z0-9][a-z0-9._/:-]*$",
        description="the image without its tag, with its registry: registry.example.com/team/forge",
    )
    tag: str = Field(
        default="0.1.0",
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}$",
        description="its tag; overlays add -cpu or -cuda, the targets of the Dockerfile",
    )
    digest: str | None = Field(
        default=None, description="sha256:... of one image for every overlay, in place of the tag"
    )
    pull_secret: str | None = Field(
        default=None, description="Secret with the registry's credentials; null: none is needed"
    )

    @field_validator("tag")
    @classmethod
    def _is_a_version(cls, value: str) -> str:
        if value == "latest":
            raise broken("must name a version; what latest is changes", "give the release's tag")
        return value

    @field_validator("digest")
    @classmethod
    def _is_a_digest(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"sha256:[0-9a-f]{64}", value):
            raise broken("must be sha256: and 64 hexadecimal digits", "copy it from the registry")
        return value


class TolerationSpec(SpecSection):
    """Configure a taint that the pods on GPUs tolerate."""

    key: str = Field(description="the taint's key")
    operator: Literal["Exists", "Equal"] = Field(
        default="Exists", description="Exists: any value; Equal: this one"
    )
    value: str | None = Field(default=None, description="with operator Equal")
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

    product: str | None = Field(
        default="NVIDIA-H100-80GB-HBM3",
        description="the nodes' label nvidia.com/gpu.product; null: no such label is asked for",
    )
    gb: float = Field(
        default=80.0, gt=0, description="memory of one GPU, GB (10^9 bytes), that the plan must fit"
    )
    node_labels: dict[str, str] = Field(
        default={}, description="further labels of the nodes (nodeSelector)"
    )
    tolerations: Annotated[tuple[TolerationSpec, ...], AsTuple] = Field(
        default=(TolerationSpec(key="nvidia.com/gpu"),), description="taints of these nodes"
    )


class StorageSpec(SpecSection):
    """Configure the claims."""

    class_name: str | None = Field(
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

    claim: str | None = Field(
        default=None,
        description="a claim of yours that has it, mounted read-only; null: the image has it, or, "
        "for a model of the hub, a claim is made and filled once by a Job",
    )
    path: str | None = Field(default=None, description="its folder in that claim")
    token_secret: str | None = Field(
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


class DeploymentSpec(SpecSection):
    """Configure the manifests of a cluster, `deploy/values.yaml`."""

    namespace: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$",
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
    queue: str | None = Field(
        default=None, description="Kueue's queue for MonarchMeshes and Jobs; null: none"
    )
    certificates: str | None = Field(
        default=None,
        description="Secret with ca.crt, tls.crt and tls.key of the control plane, such as "
        "cert-manager makes; null: they are in forge-control, beside the token",
    )
