"""Keep the sizes that pools were given by `forge scale`, or by load, when a run is resumed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from cartridge_forge.protocols.errors import ForgeError
from cartridge_forge.protocols.spec.mesh import RunSpec

Loads = tuple[tuple[float, int], ...]
"""The loads of a pool as (start in seconds, requests), oldest first, without equal neighbours; each
holds until the next: `((0.0, 4), (2.5, 9))`; empty at first."""
GIVEN = "spec"  # `by` of a `scaled` event whose size was given as the run was resumed


@dataclass(frozen=True)
class PoolSize:
    """Hold the size of a role's pool, and the one `before` that it replaces. `by` is who set it:
    GIVEN now, or at the time `at` "hand" or "load"."""

    role: str
    replicas: int
    before: int
    by: str
    at: str = ""

    def __str__(self) -> str:
        how = {GIVEN: "as given now", "load": f"as its load asked for at {self.at}"}
        suffix = f", not {self.before}" if self.by == GIVEN and self.before != self.replicas else ""
        reason = how.get(self.by, f"as scaled at {self.at}")
        return f"{self.role}: {self.replicas} replicas, {reason}{suffix}"


def opening(spec: RunSpec, sizes: Sequence[PoolSize]) -> RunSpec:
    """Return the spec to open the mesh with: pools that shrank have their size at once. Those that
    grew are scaled to theirs by `restore`, because their hosts must be asked for."""
    roles = spec.mesh.roles
    less = {s.role: s.replicas for s in sizes if s.by != GIVEN and s.replicas < s.before}
    changed = {name: roles[name].model_copy(update={"replicas": n}) for name, n in less.items()}
    mesh = spec.mesh.model_copy(update={"roles": roles | changed})
    return spec.model_copy(update={"mesh": mesh})


async def restore(
    sizes: Sequence[PoolSize],
    scale: Callable[[str, int], Awaitable[None]],
    note: Callable[..., None],
    warn: Callable[[str], None],
) -> None:
    """Scale the pools that grew, and note the sizes that are given now. A pool whose hosts are
    refused keeps the size of the spec, with a warning."""
    for size in sizes:
        if size.by == GIVEN:
            note("scaled", role=size.role, replicas=size.replicas, before=size.before, by=GIVEN)
        elif size.replicas > size.before:
            try:
                await scale(size.role, size.replicas)
            except ForgeError as refusal:
                warn(f"{size.role} has {size.before} replicas, not {size.replicas}: {refusal}")
