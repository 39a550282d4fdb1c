"""Configure the hosts of a mesh's roles, the `hosts` section of `meshes/*.yaml`.

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

from cartridge_forge.protocols.spec.base import AsTuple, LocalPath, SpecSection, broken

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
    tls: LocalPath | None = Field(
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

    @field_validator("addresses")
    @classmethod
    def _of_kind_addresses(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        kind = info.data.get("kind")
        if kind == "addresses" and not value:
            raise broken("must be given with hosts.kind addresses", "list tls://host:port")
        if kind not in ("addresses", None) and value:
            raise broken("belongs to hosts.kind addresses alone", "remove it or change hosts.kind")
        for address in value:
            match = ADDRESS.fullmatch(address)
            if not match or not 1 <= int(match[2]) < 65535:
                raise broken(
                    "must hold tls://host:port addresses", f"write {address!r} as tls://host:26600"
                )
        if len(set(value)) < len(value):
            raise broken("must list each host once", "remove the second")
        if len({is_tls(address) for address in value}) == 2:
            raise broken("must be tls:// for all hosts, or tcp:// for all", "change the others")
        return value
