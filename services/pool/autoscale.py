"""How many replicas a pool should have: a pure policy over the load of the last while.

    load    ongoing and waiting requests of the whole pool
    high    load > replicas * target_ongoing * (1 + tolerance), throughout the last up_delay_s
    low     load < replicas * target_ongoing * (1 - tolerance), throughout the last down_delay_s
    wanted  ceil(load / target_ongoing), within min..max: of the least load while it was high, of
            the greatest while it was low; the size as it is where it was neither

Taking the least of a high while and the greatest of a low one, a spike shorter than up_delay_s
starts nothing and a dip shorter than down_delay_s stops nothing. At a constant load the size only
grows or only shrinks, until the delays see nothing else, and `ceil(load / target_ongoing)` leads
to itself: it never goes there and back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from protocols.spec.services import AutoscaleSpec


@dataclass(frozen=True)
class LoadHistory:
    """What the pool's load was: (since when in seconds, requests), oldest first, no two in a row
    alike. Each holds until the next. `LoadHistory(((0.0, 4), (2.5, 9)))`; empty at the start."""

    seen: tuple[tuple[float, int], ...] = ()


def decide(
    loads: LoadHistory, now_s: float, load: int, replicas: int, spec: AutoscaleSpec
) -> tuple[LoadHistory, int]:
    """The loads with this one, and how many replicas the pool should have from now on.

    `now_s` is of a clock that never goes back; `load` the pool's ongoing and waiting requests;
    `replicas` the size the pool was last given, be they all started yet or not.
    """
    seen = loads.seen
    if not seen or seen[-1][1] != load:
        seen = (*seen, (now_s, load))
    # The load in force when the longer delay began is the oldest that is still looked at.
    begin = now_s - max(spec.up_delay_s, spec.down_delay_s)
    in_force = max((i for i, (since, _) in enumerate(seen) if since <= begin), default=0)
    seen = seen[in_force:]

    wanted = replicas
    per_size = replicas * spec.target_ongoing
    least = min(_during(seen, now_s - spec.up_delay_s), default=None)
    greatest = max(_during(seen, now_s - spec.down_delay_s), default=None)
    if least is not None and least > per_size * (1 + spec.tolerance):
        wanted = math.ceil(least / spec.target_ongoing)
    elif greatest is not None and greatest < per_size * (1 - spec.tolerance):
        wanted = math.ceil(greatest / spec.target_ongoing)
    return LoadHistory(seen), min(max(wanted, spec.min), spec.max)


def _during(seen: tuple[tuple[float, int], ...], begin: float) -> Iterable[int]:
    """The loads from `begin` on; none where `begin` is before the first, as not all is known."""
    if seen[0][0] > begin:
        return []
    ends = [*(since for since, _ in seen[1:]), math.inf]
    return [load for (_, load), end in zip(seen, ends, strict=True) if end > begin]
