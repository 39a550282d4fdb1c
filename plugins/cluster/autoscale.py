"""Size a pool by its load.

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
from collections.abc import Iterable

from cartridge_forge.protocols.spec.services import AutoscaleSpec
from cartridge_forge.services.pool.sizes import Loads


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
