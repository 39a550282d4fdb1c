"""Choose the host on which a process starts, by pure functions over hosts and their load.

own workers first    a role's replicas go to the workers of that role, else to those of any
fewest first         of hosts with room, the one with the fewest processes, the earlier of equals
spares               only on workers of any role and any number, so a spare takes no replica's slot
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """Describe a host for placement: `Slot("generator", capacity=1, busy=0)`.

    `role` "" means any role and `capacity` 0 any number. `busy` counts the processes there, also
    those that start or end (the ranks of one replica count as one). `well` is false while the host
    is suspect. A host that is being left has no slot.
    """

    role: str = ""
    capacity: int = 0
    busy: int = 0
    well: bool = True

    def fits(self, role: str) -> bool:
        """Return whether a process of that role ("" for a spare) may ever start there."""
        return self.role in ("", role) and bool(role or not self.capacity)

    @property
    def has_room(self) -> bool:
        return not self.capacity or self.busy < self.capacity


def choose(spots: Sequence[Slot], role: str, without: int | None = None) -> int | None:
    """Return the index of the host for one more process of the role, or None."""
    free = [
        i
        for i, spot in enumerate(spots)
        if i != without and spot.well and spot.fits(role) and spot.has_room
    ]
    return min(free, key=lambda i: (spots[i].role != role, spots[i].busy), default=None)


def lack(spots: Sequence[Slot], role: str) -> str:
    """Return a message why no process of the role starts, such as `"2 workers take generator: 1
    full, 1 silent"`."""
    fit = [spot for spot in spots if spot.fits(role)]
    if not fit:
        return f"no worker takes {role or 'spares'}"
    silent = sum(not spot.well for spot in fit)
    full = sum(spot.well and not spot.has_room for spot in fit)
    workers = "1 worker takes" if len(fit) == 1 else f"{len(fit)} workers take"
    return f"{workers} {role or 'spares'}: {full} full, {silent} silent"


def crowded(spots: Sequence[Slot], at_work: Sequence[int]) -> int | None:
    """Return the index of a host with at least two more working processes than another host of its
    role that has room, or None."""
    for role in sorted({spot.role for spot in spots}):
        alike = [i for i, spot in enumerate(spots) if spot.role == role and spot.well]
        least = min((at_work[i] for i in alike if spots[i].has_room), default=None)
        most = max(alike, key=lambda i: at_work[i], default=None)
        if least is not None and most is not None and at_work[most] - least >= 2:
            return most
    return None
