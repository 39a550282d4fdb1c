"""Decide how a run's own host is reached by the others, before Monarch is imported.

local                       Monarch's own sockets, which no other host reaches
tcp://127.0.0.1:0           workers on loopback: plain TCP
tls://10.0.0.1:0            hosts.tls: mutual TLS
tcp://10.0.0.1:0            hosts.insecure: plain TCP, said loudly
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from protocols.errors import SpecError
from protocols.spec.hosts import HostsSpec, is_loopback_host
from services.hosts.own_address import reached_at
from services.tls.identity import read_identity


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
