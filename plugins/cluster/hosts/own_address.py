"""Find the address by which the other hosts of a mesh reach this one."""

from __future__ import annotations

import os
import socket

from cartridge_forge.plugins.cluster.hosts.handshake import host_and_port
from cartridge_forge.plugins.cluster.spec import pod_host
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.mesh import HostsSpec

ANYWHERE = ("192.0.2.1", 9)  # a documentation network: reached over the default route


def reached_at(hosts: HostsSpec) -> str:
    """Return this host's address: `hosts.reached_at`, else that of the route to the first worker,
    else of the default route. IPv6 addresses are in brackets. With TLS a name stays a name, which
    the certificate is for, and a pod goes by the name that its address has. Raises SpecError for a
    name without an address, and where there is no such route."""
    named = hosts.reached_at
    try:
        if named is not None:
            address = _address_of(named)
            return _bracketed(address if hosts.tls is None else named)
        if hosts.addresses:
            host, port = host_and_port(hosts.addresses[0])
            return _bracketed(_local_address(_address_of(host.strip("[]")), port))
        local, namespace = _local_address(*ANYWHERE), os.environ.get("POD_NAMESPACE")
        if hosts.tls is not None and hosts.kind == "kubernetes" and namespace:
            return pod_host(local, namespace)
        return _bracketed(local)
    except OSError as error:
        to = named or (hosts.addresses[0] if hosts.addresses else "anywhere")
        raise SpecError(
            f"hosts.reached_at: this host found no address for the workers ({to}: "
            f"{error.strerror}); set it to this host's address as the workers reach it"
        ) from error


def _address_of(name: str) -> str:
    return str(socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)[0][4][0])


def _local_address(address: str, port: int) -> str:
    """Return the route's local address. Connecting a datagram socket sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
