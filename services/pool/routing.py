"""Choose the replica that takes a request, by pure policies.

A replica is identified by its slot in the pool, which its replacement keeps. Replicas come and go
between two choices; no policy assumes that it sees the same ones again.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

from protocols.spec.services import RouterName


class ReplicaLoad(NamedTuple):
    """Hold the pool slot and the number of ongoing requests of a replica that may take a request.
    One is made for each replica at each request; a tuple is the fastest to make."""

    slot: int
    ongoing: int


class Router(Protocol):
    """Choose a replica by one policy, for one pool. `choose` returns the slot of one of `seats`,
    which is not empty. Requests of one `session` are served better by the same replica."""

    def choose(self, seats: Sequence[ReplicaLoad], session: str | None) -> int: ...


class RoundRobin:
    """Choose every replica in turn, by slot."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, seats: Sequence[ReplicaLoad], session: str | None = None) -> int:
        # By slot, not by index in `seats`: a replica that leaves or returns shifts no other's turn.
        slots = [seat.slot for seat in seats]
        self._last = min((i for i in slots if i > self._last), default=min(slots))
        return self._last


class LeastLoaded:
    """Choose a replica with the fewest ongoing requests, and replicas with equally few in turn."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def choose(self, seats: Sequence[ReplicaLoad], session: str | None = None) -> int:
        fewest = min(seat.ongoing for seat in seats)
        return self._turns.choose([seat for seat in seats if seat.ongoing == fewest])


class SessionAffinity:
    """Choose the same replica for the same session, and the least loaded one without a session.

    Uses rendezvous hashing: each session ranks all replicas and takes the first of its ranking that
    is in service. A replica that leaves moves only its own sessions, evenly over the others. A
    replica that joins takes only the sessions that rank it first.
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
    """Return a new router of the policy that a spec names."""
    return ROUTERS[name]()
