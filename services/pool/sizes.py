"""Find the sizes of pools: as a resumed run begins, and by load as it goes on.

`forge scale` is not forgotten when a run is resumed:

    given now, on the command line or in the mesh file, and new    wins, and is noted
    else set last by `forge scale`, or by load                     a `scaled` event of the run
    else                                                           the mesh file's

A size given now is new where it is another than the run was last given. Where a person resumes the
run, one of `--set` counts as new in any case; a command that restarts itself repeats its own.

A role with `autoscale` follows its recent load, by a pure policy:

    load    ongoing and waiting requests of the whole pool
    high    load > replicas * target_ongoing * (1 + tolerance), throughout the last up_delay_s
    low     load < replicas * target_ongoing * (1 - tolerance), throughout the last down_delay_s
    wanted  ceil(load / target_ongoing), within min..max: of the least load while it was high, of
            the greatest while it was low; the current size where it was neither

Because the least load of a high period counts, a spike shorter than up_delay_s starts nothing.
Because the greatest load of a low period counts, a dip shorter than down_delay_s stops nothing. At
a constant load the size changes in one direction only, and `ceil(load / target_ongoing)` is a fixed
point, so the size never oscillates.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cartridge_forge.protocols.errors import ForgeError
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.protocols.spec.services import AutoscaleSpec

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


def resumed_sizes(
    began: RunSpec,
    now: RunSpec,
    events: Iterable[Mapping[str, Any]],
    given_roles: Collection[str] = (),
) -> tuple[PoolSize, ...]:
    """Return the sizes that are others than those of the spec `now`, or are new. `began` is the
    spec that the run began with; `told` are the roles whose size a person gives with `--set`."""
    given_sizes = {name: role.replicas for name, role in began.roles}
    last: dict[str, Mapping[str, Any]] = {}
    for event in events:
        if event.get("event") == "scaled" and event["role"] in given_sizes:
            last[event["role"]] = event
            if event["by"] == GIVEN:
                given_sizes[event["role"]] = event["replicas"]
    sizes = []
    for name, role in now.roles:
        if name not in given_sizes:
            continue
        replicas, scaled = role.replicas, last.get(name)
        last_size = given_sizes[name] if scaled is None else scaled["replicas"]
        if replicas != given_sizes[name] or (name in given_roles and replicas != last_size):
            sizes.append(PoolSize(name, replicas, last_size, GIVEN))
        elif scaled is not None and last_size != replicas:
            sizes.append(PoolSize(name, last_size, replicas, scaled["by"], scaled["time"]))
    return tuple(sizes)


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


Loads = tuple[tuple[float, int], ...]
"""The loads of a pool as (start in seconds, requests), oldest first, without equal neighbours; each
holds until the next: `((0.0, 4), (2.5, 9))`; empty at first."""


def decide(
    loads: Loads, now_s: float, load: int, replicas: int, spec: AutoscaleSpec
) -> tuple[Loads, int]:
    """Return the history with this load added, and how many replicas the pool should have now.

    `now_s` is of a monotonic clock. `load` counts the pool's ongoing and waiting requests.
    `replicas` is its last target, whether all have started or not.
    """
    if not loads or loads[-1][1] != load:
        loads = (*loads, (now_s, load))
    # The load in force when the longer delay began is the oldest that still counts.
    begin = now_s - max(spec.up_delay_s, spec.down_delay_s)
    in_force = max((i for i, (since, _) in enumerate(loads) if since <= begin), default=0)
    loads = loads[in_force:]

    wanted = replicas
    per_size = replicas * spec.target_ongoing
    least = min(_during(loads, now_s - spec.up_delay_s), default=None)
    greatest = max(_during(loads, now_s - spec.down_delay_s), default=None)
    if least is not None and least > per_size * (1 + spec.tolerance):
        wanted = math.ceil(least / spec.target_ongoing)
    elif greatest is not None and greatest < per_size * (1 - spec.tolerance):
        wanted = math.ceil(greatest / spec.target_ongoing)
    return loads, min(max(wanted, spec.min), spec.max)


def _during(loads: Loads, begin: float) -> Iterable[int]:
    """Return the loads from `begin` on, or none when the history starts after `begin`."""
    if loads[0][0] > begin:
        return []
    ends = [*(since for since, _ in loads[1:]), math.inf]
    return [load for (_, load), end in zip(loads, ends, strict=True) if end > begin]
