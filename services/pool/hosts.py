"""Describe workers on other hosts and attach to them: one Monarch worker, and one mesh, per host.

    os.environ.update(LINK_ENVIRONMENT)                  # also in every worker's environment
    monarch.actor.enable_transport("tls://10.0.0.1:0")   # where this host is reached
    hosts = AddressedHosts(["tls://10.0.0.2:26600", "tls://10.0.0.3:26600"])
    service = await Service.of(hosts)                    # services.pool.membership attaches them

There is one mesh per worker because a mesh with a dead host neither spawns nor shuts down.

The kernel retries a cut connection at growing intervals: after a cut of 35 s it took 18 s more, and
0.6 s with `sysctl net.ipv4.tcp_retries2=5` on all hosts.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from monarch.actor import HostMesh

# Read by Monarch when it is imported. Once a message could not be delivered for that long (30 s by
# default), its host is never reached again, not even by attaching anew. So Monarch keeps trying,
# and heartbeats decide which host is lost. A start that Monarch gave up may still come up on the
# lost host when the connection returns, so one start waits for that instead of many retries.
LINK_ENVIRONMENT = {
    "HYPERACTOR_CHANNEL_RECONNECT_TIMEOUT": "24h",
    "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "24h",
    "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE": "10m",
}


PACKAGES = ("cartridge-forge", "torchmonarch", "torch")  # must have equal versions on all hosts


@dataclass(frozen=True)
class HostWorker:
    """Describe a running Monarch worker, as a `HostSource` reports it.

    name       in status and events: "generator-0"; unique among the workers of a time
    address    the one to attach to: "tls://10.0.0.2:26600"; "" where `mesh` is attached already
    role       the only role whose replicas run there; "" for any
    capacity   maximum number of replicas there; 0 for any number
    gpus       how many GPUs its processes may use; None where that is not known
    """

    name: str
    address: str
    role: str = ""
    capacity: int = 0
    gpus: int | None = None
    mesh: HostMesh | None = None


class HostSource(Protocol):
    """Provide workers. Its failures are RunErrors that name the remedy; after one of them it may be
    asked again, except after a HostsEndedError, which ends the run."""

    def workers(self) -> AsyncGenerator[tuple[HostWorker, ...]]:
        """Yield all workers whenever they change, until the generator is closed; first once the
        requested ones exist. A worker that is missing from a later tuple is to be left, or is gone.
        The workers of a role are in the order in which `want` keeps them."""
        ...

    async def want(self, role: str, replicas: int) -> None:
        """Request workers for so many replicas of a role: more come in time, or the last, which are
        empty by then, are removed. Has no effect where workers take any role."""
        ...

    def lacking(self) -> Sequence[str]:
        """Return a line for each worker that was requested and is not there, with its reason and
        its remedy, where the source knows them."""
        ...

    async def close(self) -> None:
        """Give back the workers that were made for the run."""
        ...


class Membership(Protocol):
    """Attach the workers of a source as they come, and leave them as they go."""

    async def open(self) -> None:
        """Attach the first workers. Raises RunError when one cannot be attached."""
        ...

    def lacking(self) -> Sequence[str]:
        """Return what the source says of workers that are not there."""
        ...

    async def close(self) -> None:
        """Give back the hosts that the source made for the run."""
        ...


async def finish(future: Any) -> Any:
    """Await a Monarch future in a coroutine, which asyncio can bound."""
    return await future


def versions(*, torchstore: bool = True) -> dict[str, str]:
    """Return the versions that must be equal on both sides; "none" for what is not installed.

    TorchStore counts where it is the tensor plane. A build for CPUs ("2.13.0+cpu") equals one for
    GPUs. Imports none of the packages.
    """
    versions_here = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in (*PACKAGES, *(["torchstore"] if torchstore else [])):
        try:
            versions_here[package] = importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            versions_here[package] = "none"
    return versions_here
