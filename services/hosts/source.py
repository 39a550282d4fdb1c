"""Other hosts: each runs a Monarch worker, and is attached to as a mesh of its own.

    os.environ.update(LINK_ENVIRONMENT)              # and so in the environment of every worker
    monarch.actor.enable_transport("tcp://10.0.0.1:0")   # where this host is reached
    hosts = Addresses(["tcp://10.0.0.2:26600", "tcp://10.0.0.3:26600"])
    service = await Service.of(hosts)                    # services.pool.membership greets and
    attaches them

One mesh per worker: a mesh with a dead host among its hosts neither spawns nor shuts down.

A connection that was cut for long is tried again ever more seldom, by the kernel's rules: after
35 s it took 18 s more, and 0.6 s with `sysctl net.ipv4.tcp_retries2=5` on all hosts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from protocols.errors import RunError

if TYPE_CHECKING:
    from monarch.actor import HostMesh

# Read by Monarch when it is imported. Once a message could not be delivered for that long (30 s by
# default), its host is never reached again, not even by attaching anew: so Monarch keeps trying,
# and who is lost is decided by our heartbeat. A start that Monarch gave up may still come up on the
# lost host when the link returns: so it waits for that rather than trying many.
LINK_ENVIRONMENT = {
    "HYPERACTOR_CHANNEL_RECONNECT_TIMEOUT": "24h",
    "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "24h",
    "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE": "10m",
}


@dataclass(frozen=True)
class HostWorker:
    """A Monarch worker that runs, as whoever found it tells of it.

    name       in status and events: "generator-0"; of those there are at a time it is its alone
    address    where it is attached to: "tcp://10.0.0.2:26600"; "" where `mesh` is attached already
    role       the only role whose replicas run there; "" for any
    capacity   most replicas there at a time; 0 for any number
    """

    name: str
    address: str
    role: str = ""
    capacity: int = 0
    mesh: HostMesh | None = None


class HostSource(Protocol):
    """Where workers come from. Its failures are RunErrors that name the remedy."""

    def workers(self) -> AsyncGenerator[tuple[HostWorker, ...]]:
        """All there are, whenever that changes, until it is closed: at first once those that were
        asked for are there. Who is missing from a later answer is to be left, or is gone. Those of
        a role are in the order in which `want` keeps them."""
        ...

    async def want(self, role: str, replicas: int) -> None:
        """Have workers for so many replicas of a role: more come in time, the last are taken away
        (they are empty by then). Where workers are not a role's own, nothing changes."""
        ...

    async def close(self) -> None:
        """Give back what was made for the run."""
        ...


class AddressedHosts:
    """A `HostSource` of workers that somebody else starts and ends: always the same, for any role.

    One that is drained or lost, and is started again at its address, is used again."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._workers = tuple(HostWorker(a.removeprefix("tcp://"), a) for a in addresses)

    async def workers(self) -> AsyncGenerator[tuple[HostWorker, ...]]:
        yield self._workers
        await asyncio.Event().wait()  # until it is closed

    async def want(self, role: str, replicas: int) -> None:
        pass

    async def close(self) -> None:
        pass


async def attach(workers: Sequence[str], timeout_s: float = 30.0) -> list[HostMesh]:
    """A mesh for each worker, `tcp://host:port`. Raises RunError that names who did not answer."""
    from monarch.actor import attach_to_workers  # may read the environment first here

    meshes = [attach_to_workers(ca="trust_all_connections", workers=[w]) for w in workers]

    async def initialized(worker: str, mesh: HostMesh) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await mesh.initialized
        except Exception as error:  # however it fails, the remedy is the same
            raise RunError(
                f"the worker at {worker} was not attached within {timeout_s:g} s ({error!r:.200}); "
                "check that it runs the same Monarch version and is reached from here"
            ) from error

    await asyncio.gather(*(initialized(w, m) for w, m in zip(workers, meshes, strict=True)))
    return meshes
