"""A host of a mesh: `python -m services.worker` waits for a controller that attaches to it.

It is told nothing: its address is its own name in DNS and $MONARCH_PORT (26600 if unset), and it
listens on every interface. There is no TLS and no authentication between workers: only the mesh's
own pods or hosts may reach the port (deploy/k8s has the network policy). End it with SIGTERM, under
an init such as tini: as process 1 it would ignore that.
"""

from __future__ import annotations

import os
import socket

from services.hosts import LINK_ENVIRONMENT

PORT = 26600


def address(name: str, port: int) -> str:
    """What others call and what it listens on, in Monarch's words:
    `"tcp://generator-0.generator-svc:26600@tcp://0.0.0.0:26600"`."""
    return f"tcp://{name}:{port}@tcp://0.0.0.0:{port}"


def main() -> None:
    os.environ.update(LINK_ENVIRONMENT)  # read by Monarch when it is imported
    from monarch.actor import run_worker_loop_forever

    port = int(os.environ.get("MONARCH_PORT", PORT))
    run_worker_loop_forever(address=address(socket.getfqdn(), port), ca="trust_all_connections")


if __name__ == "__main__":
    main()
