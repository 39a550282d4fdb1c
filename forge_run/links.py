"""Decide how a run's own host is reached by the others, before Monarch is imported.

local                       Monarch's own sockets, which no other host reaches
tcp://127.0.0.1:0           workers on loopback: plain TCP
tls://10.0.0.1:0            hosts.tls: mutual TLS
tcp://10.0.0.1:0            hosts.insecure: plain TCP, said loudly
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from protocols.errors import SpecError
from protocols.spec.hosts import HostsSpec, is_loopback_host, pod_host
from services.hosts.handshake import host_and_port
from services.tls.identity import read_identity

ANYWHERE = ("192.0.2.1", 9)  # a documentation network: reached over the default route


def prepare_links(hosts: HostsSpec, say: Callable[[str], None]) -> str | None:
    """Return the address at which Monarch is to listen for the workers, None where all roles are on
    this host, and set the variables by which Monarch and its processes find the certificate.

    `say` gets the warning of plain TCP. Raises SpecError for a certificate that does not fit, and
    for plain TCP beyond loopback that `hosts.insecure` does not allow.
    """
    if hosts.kind == "local":
        return None
    host = reached_at(hosts)
    if hosts.tls is not None:
        identity = read_identity(Path(hosts.tls), "hosts.tls")
        identity.require_name(host, "hosts.tls")
        os.environ.update(identity.environment())
        return f"tls://{host}:0"
    if not is_loopback_host(host):
        if not hosts.insecure:
            raise SpecError(
                f"hosts.tls: the workers reach this host at {host} by plain TCP, and whoever else "
                "does runs code here; set hosts.tls, or hosts.insecure on a network of the mesh's "
                "own"
            )
        say(
            f"WARNING: hosts.insecure: whoever reaches {host} or a worker on the mesh's ports runs "
            "code there"
        )
    return f"tcp://{host}:0"


def reached_at(hosts: HostsSpec) -> str:
    """Return this host's address: `hosts.reached_at`, else that of the route to the first worker,
    else of the default route. IPv6 addresses are in brackets. With TLS a name stays a name, which
    the certificate is for, and a pod goes by the name that its address has. Raises SpecError for a
    name without an address, and where there is no such route."""
    named = hosts.reached_at
    try:
        if named is not None:
            found = _address_of(named)
            return _bracketed(found if hosts.tls is None else named)
        if hosts.addresses:
            host, port = host_and_port(hosts.addresses[0])
            return _bracketed(_local_address(_address_of(host.strip("[]")), port))
        own, namespace = _local_address(*ANYWHERE), os.environ.get("POD_NAMESPACE")
        if hosts.tls is not None and hosts.kind == "kubernetes" and namespace:
            return pod_host(own, namespace)
        return _bracketed(own)
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
