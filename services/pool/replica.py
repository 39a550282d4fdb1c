"""Hold one replica of a pool, its process and actor; choose one for a request, and call it.

Routers are pure policies. They know a replica by its slot in the pool, which its replacement keeps;
replicas come and go between two choices, and no policy assumes that it sees the same ones again.

A call to a replica of several ranks goes to all of them. Rank 0's reply is returned; an error of
any rank is raised.
"""

from __future__ import annotations

import asyncio
import math
import pickle
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from cartridge_forge.protocols.errors import EngineDied, RanksLostError
from cartridge_forge.protocols.records.status import ReplicaState, ReplicaStatus
from cartridge_forge.protocols.spec.services import RouterName
from cartridge_forge.services.pool.health import HealthState, lost
from cartridge_forge.services.pool.process import ReplicaProcess


class ReplicaLost(Exception):
    """Report that the replica of a call is lost. `suspect` is set where its engine died in a step
    that was over this call, which may be the cause."""

    def __init__(self, reason: str, suspect: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.suspect = reason, suspect


class EngineLost(ReplicaLost):
    """Report that the replica is lost because its engine died. Its process still replies."""


class ReplicaTimeout(Exception):
    """Report a missing reply. Not a TimeoutError, which an actor may raise itself."""


@dataclass(eq=False)
class Replica:
    """Hold one process in a slot of a pool. Its replacement is a `Replica` of the next generation.

    `actor` is the actor's handle, or that of rank 0; `others` are the handles of the other ranks.
    `told` holds the newest version it received, by topic; `catching_up` is the task that sends
    missed updates. `begun` is the start, and `beaten` the last heartbeat or reply to a call
    (monotonic seconds).
    `calls` are the time limits of the calls in flight; when it dies, `ended` is set and they are
    over at once. Where its engine died alone (`engine_died`), they still get the replies of its
    process, which say whether a call may be the cause.
    """

    role: str
    slot: int
    generation: int = 0
    life: HealthState = field(default_factory=HealthState)
    process: ReplicaProcess | None = None
    actor: Any = None
    others: Sequence[Any] = ()
    actor_name: str = ""
    ongoing: int = 0
    suspects: int = 0  # of the ongoing requests, those during which an engine died before
    memory_bytes: int = 0
    begun: float = field(default_factory=time.monotonic)
    beaten: float = field(default_factory=time.monotonic)
    told: dict[str, int] = field(default_factory=dict)
    catching_up: asyncio.Task[None] | None = None
    calls: CallLimits = field(default_factory=lambda: CallLimits())
    ended: str = ""
    engine_died: bool = False

    @property
    def name(self) -> str:
        return f"{self.role}[{self.slot}]"

    @property
    def state(self) -> ReplicaState:
        return self.life.state

    @property
    def version(self) -> int:
        """Return the newest cartridge version that it received; -1 for none."""
        return self.told.get("cartridge", -1)

    def end(self, reason: str) -> None:
        """Mark the replica dead and fail every call in flight with ReplicaLost, unless its process
        still replies to them."""
        self.ended = self.ended or reason
        self.life = lost(self.life)
        if not self.engine_died:
            self.calls.end()

    def status(self) -> ReplicaStatus:
        process = self.process
        return ReplicaStatus(
            self.name, self.state, process.host if process else "", process.pid if process else 0,
            self.ongoing, self.version, self.memory_bytes,
        )  # fmt: skip


class CallLimits:
    """End the calls of a replica at their deadlines, by one timer for all: asyncio's own, one for
    each call, are a third of what routing costs."""

    def __init__(self) -> None:
        self._deadlines: dict[asyncio.Timeout, float] = {}  # of the loop's clock
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, limit: asyncio.Timeout, deadline: float) -> None:
        """Have `limit`, which has been entered, expire at `deadline`."""
        self._deadlines[limit] = deadline
        if self._timer is None or deadline < self._timer.when():
            self._wait(deadline)

    def discard(self, limit: asyncio.Timeout) -> None:
        del self._deadlines[limit]

    def end(self, until: float = math.inf) -> None:
        """End the calls whose deadlines are not after `until`."""
        for limit, deadline in self._deadlines.items():
            if deadline <= until and not limit.expired():  # a call may take turns to be cancelled
                limit.reschedule(0.0)

    def _wait(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(deadline, self._due)

    def _due(self) -> None:
        now, self._timer = asyncio.get_running_loop().time(), None
        self.end(now)
        if later := [deadline for deadline in self._deadlines.values() if deadline > now]:
            self._wait(min(later))


async def ask(replica: Replica, method: str, args: tuple[Any, ...], deadline: float) -> Any:
    """Call one replica and return its reply, until `deadline` (monotonic seconds).

    Raises ReplicaLost when it dies, ReplicaTimeout at the deadline, or the actor's exception.
    """
    if replica.ended:
        raise ReplicaLost(replica.ended)
    # A death ends the wait as the deadline does, so that a call needs no task of its own.
    limit = asyncio.timeout(None)
    try:
        async with limit:
            replica.calls.add(limit, deadline)  # the loop's clock is monotonic too
            try:
                if replica.others:
                    reply = await _call_ranks(replica, method, args)
                else:
                    reply = await _call_rank(replica.name, replica.actor, method, args)
                replica.beaten = time.monotonic()
                return reply
            finally:
                replica.calls.discard(limit)
    except EngineLost:
        replica.engine_died = True
        raise
    except TimeoutError as error:
        if not limit.expired():  # the actor's own
            raise
        if replica.ended:
            raise ReplicaLost(replica.ended) from error
        raise ReplicaTimeout(f"{replica.name}.{method} did not answer in time") from error


async def _call_ranks(replica: Replica, method: str, args: tuple[Any, ...]) -> Any:
    handles = (replica.actor, *replica.others)
    names = (f"{replica.name} rank {rank}" for rank in range(len(handles)))
    # Wait for all ranks, unless one dies: the error that matters may arrive last.
    calls = [_settled(_call_rank(n, h, method, args)) for n, h in zip(names, handles, strict=True)]
    outcomes = await asyncio.gather(*calls)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, RanksLostError)), ReplicaLost(str(errors[0]))
        )
    return outcomes[0].answer


@dataclass(frozen=True)
class CallOutcome:
    """Hold the reply of a rank, or its error."""

    answer: Any = None
    error: Exception | None = None


async def _settled(call: Awaitable[Any]) -> CallOutcome:
    """Return the outcome. Raises ReplicaLost alone: once a rank is gone, others may never reply."""
    try:
        return CallOutcome(await call)
    except ReplicaLost:
        raise
    except Exception as error:
        return CallOutcome(error=error)


class Packed:
    """Carry plain data as an argument of a call: the actor gets the `value` itself. Monarch's
    pickler calls Python functions for every object, which takes three times as long as pickle."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._data = pickle.dumps(value)

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._data,)


async def _call_rank(name: str, handle: Any, method: str, args: tuple[Any, ...]) -> Any:
    try:
        # A mesh known to be dead raises at the call, not in the await.
        return await getattr(handle, method).call_one(*args)
    except ActorError as error:
        cause = getattr(error, "exception", None)
        if not isinstance(cause, Exception):
            raise
        if isinstance(cause, EngineDied):
            raise EngineLost(str(cause), cause.suspect) from error
        cause.add_note(f"raised by {name}.{method}")
        raise cause from error
    except SupervisionError as error:  # its process or its host is gone
        raise ReplicaLost(last_line(error)) from error


def last_line(error: BaseException) -> str:
    """Return an error's message without the remote traceback that Monarch puts before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


class Seat(Protocol):
    """Describe a replica to a router: its slot in the pool, and how many requests it works on."""

    slot: int
    ongoing: int


S = TypeVar("S", bound=Seat)


class Router(Protocol):
    """Choose a replica by one policy, for one pool. `choose` returns one of `seats`, which is not
    empty. Requests of one `session` are served better by the same replica."""

    def choose(self, seats: Sequence[S], session: str | None) -> S: ...


class RoundRobin:
    """Choose every replica in turn, by slot."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, seats: Sequence[S], session: str | None = None) -> S:
        # By slot, not by index in `seats`: a replica that leaves or returns shifts no other's turn.
        last = self._last
        chosen = min(seats, key=lambda seat: (seat.slot <= last, seat.slot))
        self._last = chosen.slot
        return chosen


class LeastLoaded:
    """Choose a replica with the fewest ongoing requests, and replicas with equally few in turn."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, seats: Sequence[S], session: str | None = None) -> S:
        last = self._last
        chosen = min(seats, key=lambda seat: (seat.ongoing, seat.slot <= last, seat.slot))
        self._last = chosen.slot
        return chosen


class SessionAffinity:
    """Choose the same replica for the same session, and the least loaded one without a session.

    Uses rendezvous hashing: each session ranks all replicas and takes the first of its ranking that
    is in service. A replica that leaves moves only its own sessions, evenly over the others. A
    replica that joins takes only the sessions that rank it first.
    """

    def __init__(self) -> None:
        self._others = LeastLoaded()

    def choose(self, seats: Sequence[S], session: str | None) -> S:
        if session is None:
            return self._others.choose(seats)
        return max(seats, key=lambda seat: (_rank(session, seat.slot), seat.slot))


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
