"""Open the tensor plane that a spec names.

torchstore      any number of hosts; bytes in a storage process on a mesh
shared_memory   one host; bytes in /dev/shm, mapped by readers without a copy
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from protocols.errors import SpecError
from protocols.ports import TensorPlane

if TYPE_CHECKING:
    from monarch.actor import ProcMesh

PlaneKind = Literal["torchstore", "shared_memory"]
# What a plane's code imports besides Monarch, for a fork server: half a second and 40 MB.
PLANE_IMPORTS = {"torchstore": ("torch.distributed.checkpoint",), "shared_memory": ()}


class OwnedPlane(TensorPlane, Protocol):
    """Extend `TensorPlane` for the owner that opened it: `stop` frees everything that it holds."""

    async def stop(self) -> None: ...


def import_plane(kind: PlaneKind) -> None:
    """Import a plane's code ahead. TorchStore's import takes seconds, many on busy cores, during
    which this process receives no heartbeats."""
    if kind == "torchstore":
        import services.planes.torchstore  # noqa: F401


async def open_plane(
    kind: PlaneKind, mesh: ProcMesh | None = None, timeout_s: float = 60.0
) -> OwnedPlane:
    """Open a plane of that kind, from the root client or from inside an actor.

    `mesh` has one process, which holds TorchStore's bytes; the caller spawns it, and stops it after
    the plane. Shared memory needs none. Raises SpecError for an unknown kind, PlaneError when the
    plane cannot start.
    """
    # Imported by kind: TorchStore's import takes two seconds, which the other plane saves.
    if kind == "torchstore":
        from services.planes.torchstore import TorchStorePlane

        assert mesh is not None, "the torchstore plane needs a mesh for its storage process"
        return await TorchStorePlane.start(mesh, timeout_s)
    if kind == "shared_memory":
        from services.planes.shared_memory import SharedMemoryPlane

        return await SharedMemoryPlane.start()
    raise SpecError(f"plane must be 'torchstore' or 'shared_memory': got {kind!r}")
