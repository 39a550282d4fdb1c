"""Configure the hosts of a mesh's roles: the `hosts` section of `meshes/*.yaml`.

hosts: local                                                     this host alone
hosts: {kind: addresses, addresses: [tls://10.0.0.2:26600],      where `forge worker` listens
        tls: certs/10.0.0.1}                                     this host's certificate
hosts: {kind: kubernetes, tls: /etc/forge/mesh}                  pods of the mesh's MonarchMeshes
hosts: {kind: slurm, slurm: {nodes: 4}, insecure: true}          nodes of a Slurm job

Beyond loopback the mesh talks by mutual TLS, or by plain TCP where `insecure` says so.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from protocols.spec.base import AsTuple, SpecSection, broken

# tls://host:port; an IPv6 host has brackets. A worker serves its WorkerInfo on the next port.
ADDRESS = re.compile(r"(?:tcp|tls)://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9][A-Za-z0-9.-]*):([0-9]{1,5})")


def is_tls(address: str) -> bool:
    """Return whether a worker's address is one for TLS: `"tls://10.0.0.2:26600"`."""
    return address.startswith("tls://")


def is_loopback_host(host: str) -> bool:
    """Return whether a host, an address or "localhost", is reached from itself alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


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


class HostsSpec(SpecSection):
    """Configure the hosts that the roles are spread over."""

    kind: Literal["local", "addresses", "kubernetes", "slurm"] = Field(
        default="local",
        description="local: this host; addresses: hosts that already listen; kubernetes: pods; "
        "slurm: nodes of a job",
    )
    addresses: Annotated[tuple[str, ...], AsTuple] = Field(
        default=(),
        description="tls://host:port of every host, with kind addresses; tcp:// for plain TCP",
    )
    tls: str | None = Field(
        default=None,
        description="directory with this host's ca.crt, tls.crt and tls.key, for mutual TLS with "
        "the workers; null: plain TCP, which is for loopback",
    )
    insecure: bool = Field(
        default=False,
        description="plain TCP beyond loopback too: whoever reaches a port of the mesh runs code "
        "there",
    )
    reached_at: str | None = Field(
        default=None,
        description="name or address of this host for the others; null: of the route to them",
    )
    kubernetes: KubernetesSpec | None = Field(default=None, description="with kind kubernetes")
    slurm: SlurmSpec | None = Field(default=None, description="with kind slurm")

    @field_validator("addresses")
    @classmethod
    def _of_kind_addresses(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        kind = info.data.get("kind")
        if kind == "addresses" and not value:
            raise broken("must be given with hosts.kind addresses", "list tls://host:port")
        if kind not in ("addresses", None) and value:
            raise broken("belongs to hosts.kind addresses alone", "remove it or change hosts.kind")
        for address in value:
            found = ADDRESS.fullmatch(address)
            if not found or not 1 <= int(found[2]) < 65535:
                raise broken(
                    "must hold tls://host:port addresses", f"write {address!r} as tls://host:26600"
                )
        if len(set(value)) < len(value):
            raise broken("must list each host once", "remove the second")
        if len({is_tls(address) for address in value}) == 2:
            raise broken("must be tls:// for all hosts, or tcp:// for all", "change the others")
        return value

    @field_validator("kubernetes", "slurm")
    @classmethod
    def _of_its_kind(cls, value: SpecSection | None, info: ValidationInfo) -> SpecSection | None:
        kind = info.data.get("kind")
        if value is not None and kind not in (info.field_name, None):
            raise broken(
                f"belongs to hosts.kind {info.field_name} alone", "remove it or change hosts.kind"
            )
        return value
