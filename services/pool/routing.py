"""Which replica takes a request: pure policies over the replicas that may take one.

A replica is known by its slot in the pool, which its replacement keeps. Replicas come and go
between two choices; no policy assumes that it sees the same ones again.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

from protocols.spec.services import RouterName


class ReplicaLoad(NamedTuple):
    """A replica that may take a request: its slot in the pool, and the requests it works on. One
    is made for each replica at each request, and a tuple is made fastest."""

    slot: int
    ongoing: int


class Router(Protocol):
    """One policy of one pool. `choose` answers the slot of one of `seats`, which are one or more.

    `session` names requests that are better served by one and the same replica.
    """

    def choose(self, seats: Sequence[ReplicaLoad], session: str | None) -> int: ...


class RoundRobin:
    """Every replica in turn, by slot."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, seats: Sequence[ReplicaLoad], session: str | None = None) -> int:
        # By slot, not by place in `seats`: a replica that leaves or returns shifts nobody's turn.
        slots = [seat.slot for seat in seats]
        self._last = min((i for i in slots if i > self._last), default=min(slots))
        return self._last


class LeastLoaded:
    """A replica with the fewest ongoing requests; those with equally few take turns."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def choose(self, seats: Sequence[ReplicaLoad], session: str | None = None) -> int:
        fewest = min(seat.ongoing for seat in seats)
        return self._turns.choose([seat for seat in seats if seat.ongoing == fewest])


class SessionAffinity:
    """The same replica for the same session; the least loaded one for a request without any.

    Rendezvous hashing: each session ranks all replicas, and takes the first of its ranking that is
    there. So a replica that goes moves its own sessions alone, evenly over the others, and one
    that comes takes only those that rank it first.
    """

    def __init__(self) -> None:
        self._others = LeastLoaded()

    def choose(self, seats: Sequence[ReplicaLoad], session: str | None) -> int:
        if session is None:
            return self._others.choose(seats)
        return max(seats, key=lambda seat: (_rank(session, seat.slot), seat.slot)).slot


def _rank(session: str, index: int) -> bytes:
    # Not `hash`, which differs from process to process: a resumed run keeps its affinities.
    return blake2b(f"{index}/{session}".encode(), digest_size=8).digest()


ROUTERS: dict[RouterName, type[RoundRobin] | type[LeastLoaded] | type[SessionAffinity]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "session": SessionAffinity,
}


def new_router(name: RouterName) -> Router:
    """The policy that a spec names, for one pool."""
    return ROUTERS[name]()
