"""Open the tensor plane that a spec names.

torchstore      any number of hosts; bytes in a storage process on a mesh
shared_memory   one host; bytes in /dev/shm, mapped by readers without a copy
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from cartridge_forge.protocols.plugins import resolve
from cartridge_forge.protocols.ports import TensorPlane
from cartridge_forge.protocols.spec.mesh import HostsSpec

if TYPE_CHECKING:
    from monarch.actor import ProcMesh

PlaneKind = Literal["torchstore", "shared_memory"]
# What a plane's code imports besides Monarch, for a fork server: half a second and 40 MB.
PLANE_IMPORTS = {"torchstore": ("torch.distributed.checkpoint",), "shared_memory": ()}


class OwnedPlane(TensorPlane, Protocol):
    """Extend `TensorPlane` for the owner that opened it: `stop` frees everything that it holds."""

    async def stop(self) -> None: ...


class PlaneRelays(Protocol):
    """Keep a relay on each host, which gets published tensors once for all readers there."""

    async def open(self) -> None:
        """Start a relay on every host, and keep them from now on."""
        ...

    async def open_store(self, procs: ProcMesh, hosts: HostsSpec) -> None:
        """Start the relay of the store's host in the store's process. Raises PlaneError."""
        ...

    def relayed(self, store: OwnedPlane, timeout_s: float) -> OwnedPlane:
        """Return the plane over a store and the present relays."""
        ...

    def holds(self, key: str) -> bool:
        """Return whether a key was put on a host, not into the store."""
        ...

    async def stop(self) -> None:
        """End every relay."""
        ...


def import_plane(kind: PlaneKind) -> None:
    """Import a plane's code ahead. TorchStore's import takes seconds, many on busy cores, during
    which this process receives no heartbeats."""
    if kind == "torchstore":
        resolve("planes", kind)


async def open_plane(
    kind: PlaneKind, mesh: ProcMesh | None = None, timeout_s: float = 60.0
) -> OwnedPlane:
    """Open a plane of that kind, from the root client or from inside an actor.

    `mesh` has one process, which holds TorchStore's bytes; the caller spawns it, and stops it after
    the plane. Shared memory needs none. Raises SpecError for an unknown kind, PlaneError when the
    plane cannot start.
    """
    # Imported by name: TorchStore's import takes two seconds, which the other plane saves.
    opened: OwnedPlane = await resolve("planes", kind)(mesh, timeout_s)
    return opened
