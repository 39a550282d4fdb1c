"""Route requests to a pool of actor replicas and retry them when a replica dies.

    route(method, ...)     calls one replica, and another one if that dies before the deadline
    fanout(method, ...)    calls every replica in service, once
    update(topic, version, method, ...)   calls every replica, and each later replacement before
                           that one serves
    scale(n)               starts more replicas, or drains some, while requests continue

An exception that an actor raises is raised to the caller. Only a death, which a heartbeat,
Monarch's supervision or an engine that died (EngineDied) reports, counts against the replica. A
request whose engine died is tried once more, beside no other such request.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from cartridge_forge.protocols.errors import (
    EngineDied,
    EngineKilledError,
    ForgeError,
    RanksLostError,
    RunError,
)
from cartridge_forge.protocols.files import steady_time
from cartridge_forge.protocols.ports import TraceSpan
from cartridge_forge.protocols.records.status import PoolStatus, ReplicaState, ReplicaStatus
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.protocols.spec.services import RouterName
from cartridge_forge.protocols.step import TimedReply
from cartridge_forge.services.awake_clock import loop_time
from cartridge_forge.services.pool.health import (
    EngineLost,
    HealthState,
    ReplicaLost,
    ReplicaTimeout,
    last_line,
    lost,
)
from cartridge_forge.services.pool.process import ReplicaProcess

SPANS = 2**16  # that a pool keeps: those of several steps
Span = tuple[float, float]  # begin and end of an actor's work, by `time.perf_counter`
T = TypeVar("T")
SUSPECT_DEATHS = 2  # of engines, after which a request is their cause
DOUBT_SECONDS = 0.25  # between two checks whether an update waits for a silent replica


@dataclass(eq=False)
class Replica:
    """Hold one process in a slot of a pool. Its replacement is a `Replica` of the next generation.

    `actor` is the actor's handle, or that of rank 0; `others` are the handles of the other ranks.
    `told` holds the newest version it received, by topic; `catching_up` is the task that sends
    missed updates. `begun` is the start, `beaten` the last heartbeat or reply (monotonic seconds).
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
        now, self._timer = loop_time(), None
        self.end(now)
        if later := [deadline for deadline in self._deadlines.values() if deadline > now]:
            self._wait(min(later))


async def ask(replica: Replica, method: str, args: tuple[Any, ...], deadline: float) -> Any:
    """Call one replica and return its reply, until `deadline` of the loop's time. Raises
    ReplicaLost when it dies, ReplicaTimeout at the deadline, or the actor's exception."""
    if replica.ended:
        raise ReplicaLost(replica.ended)
    # A death ends the wait as the deadline does, so that a call needs no task of its own.
    limit = asyncio.timeout(None)
    try:
        async with limit:
            replica.calls.add(limit, deadline)
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
    async def outcome(rank: int, handle: Any) -> tuple[Any, Exception | None]:
        try:
            return await _call_rank(f"{replica.name} rank {rank}", handle, method, args), None
        except ReplicaLost:  # once a rank is gone, others may never reply
            raise
        except Exception as error:
            return None, error

    # Wait for all ranks, unless one dies: the error that matters may arrive last.
    handles = enumerate((replica.actor, *replica.others))
    outcomes = await asyncio.gather(*(outcome(rank, handle) for rank, handle in handles))
    errors = [error for _, error in outcomes if error is not None]
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, RanksLostError)), ReplicaLost(str(errors[0]))
        )
    return outcomes[0][0]


async def _call_rank(name: str, handle: Any, method: str, args: tuple[Any, ...]) -> Any:
    try:
        # A mesh known to be dead raises here. `call_one`, the same of one actor, keeps memory.
        return await getattr(handle, method).choose(*args)
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


class Seat(Protocol):
    """Describe a replica to a router: its slot in the pool, and how many requests it works on."""

    slot: int
    ongoing: int


S = TypeVar("S", bound=Seat)


class Router:
    """Choose a replica by one policy, for one pool. It knows a replica by its slot, which its
    replacement keeps; replicas come and go between two choices.

    round_robin   every replica in turn, by slot: one that leaves or returns shifts no other's turn
    least_loaded  one with the fewest ongoing requests, of equally many in turn
    session       the same one for the same session (rendezvous hashing: each session ranks all
                  replicas and takes the first in service, so one that leaves moves its own sessions
                  alone), least_loaded without a session
    """

    def __init__(self, policy: RouterName) -> None:
        self._policy, self._last = policy, -1

    def choose(self, seats: Sequence[S], session: str | None = None) -> S:
        """Return one of `seats`, which is not empty."""
        if self._policy == "session" and session is not None:
            return max(seats, key=lambda seat: (_rank(session, seat.slot), seat.slot))
        loads, last = self._policy != "round_robin", self._last
        chosen = min(seats, key=lambda seat: (loads and seat.ongoing, seat.slot <= last, seat.slot))
        self._last = chosen.slot
        return chosen


def _rank(session: str, index: int) -> bytes:
    # Not `hash`, which differs from process to process: a resumed run keeps its affinities.
    return blake2b(f"{index}/{session}".encode(), digest_size=8).digest()


@dataclass(frozen=True)
class PoolUpdate:
    """Describe a call that every replica receives, by rising version within a topic."""

    topic: str
    version: int
    method: str
    args: tuple[Any, ...]


@dataclass
class RequestStatus:
    """Describe a request in flight. `replica` is "" while the request waits for one."""

    id: str
    method: str
    begun: float
    replica: str = ""
    attempt: int = 0


class Pool:
    """Hold the replicas of one role and route requests to them.

    The owner of the processes (`services.pool.service`) fills `replicas` and sets two callbacks:
    `resize` is called when the target changes, `report_death` when a call finds a dead replica.
    """

    def __init__(
        self,
        role: str,
        spec: RoleSpec,
        timeout_s: float,
        observe: Callable[[TraceSpan], None] = lambda span: None,
    ) -> None:
        self.role = role
        self.spec = spec
        self.target = spec.replicas
        self.replicas: list[Replica] = []
        self.in_flight: dict[str, RequestStatus] = {}
        self.updates: dict[str, list[PoolUpdate]] = {}
        self.served = False  # whether any replica was ever in service
        self.closed = ""  # why no further replica starts
        self.failed: ForgeError | None = None  # why lost or missing replicas are not replaced
        self.requests = self.failures = self.retries = self.restarts = self.engine_deaths = 0
        self.worked: deque[Span] = deque(maxlen=SPANS)  # when its actors worked, by end
        self.resize: Callable[[Pool], None] = lambda pool: None
        self.report_death: Callable[[Replica, str], None] = lambda replica, why: None
        self._timeout_s = timeout_s
        self._observe = observe
        self._router = Router(spec.router)
        self._ids = itertools.count(1)
        self._changed = asyncio.Event()
        self._seekers = 0  # requests that wait for a replica

    def __len__(self) -> int:
        return len(self.replicas)

    async def route(
        self, method: str, *args: Any, session: str | None = None, timeout_s: float | None = None
    ) -> Any:
        """Return the reply of one replica within `timeout_s` (default: call_timeout_s), retries
        included. With the router `session`, requests of one `session` go to the same replica while
        it serves and has room.

        Raises the actor's exception, RunError when no reply arrives in time or `attempts` replicas
        died during the request, and EngineKilledError when SUSPECT_DEATHS engines died of it.
        """
        return (await self.route_named(method, *args, session=session, timeout_s=timeout_s))[1]

    async def route_named(
        self, method: str, *args: Any, session: str | None = None, timeout_s: float | None = None
    ) -> tuple[str, Any]:
        """Return the name of the replica that replied, and its reply; otherwise as `route`."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        deadline = loop_time() + limit
        request = RequestStatus(f"{self.role}/{next(self._ids)}", method, time.monotonic())
        self.in_flight[request.id] = request
        try:
            answer = await self._attempts(request, args, session, deadline, limit)
            name = request.replica
        except BaseException:
            self.failures += 1
            raise
        finally:
            del self.in_flight[request.id]
        self.requests += 1
        return name, answer

    def session(self, name: str) -> Callable[..., Awaitable[Any]]:
        """Return `route` for a session: `ask = pool.session("u17"); await ask("generate", ...)`."""

        async def ask_in_session(method: str, *args: Any, timeout_s: float | None = None) -> Any:
            return await self.route(method, *args, session=name, timeout_s=timeout_s)

        return ask_in_session

    async def fanout(self, method: str, *args: Any) -> list[Any]:
        """Call every replica in service once, without retries, and return the replies in the order
        of the replicas. Raises the first failure once all calls have ended."""

        async def one(replica: Replica) -> Any:
            try:
                return await self._tell(replica, method, args)
            except ReplicaLost as loss:
                raise RunError(f"{replica.name}.{method} failed: {loss.reason}") from loss

        return await gather(one(r) for r in self.replicas if r.state is ReplicaState.HEALTHY)

    async def split(
        self,
        items: Sequence[T],
        work: Callable[[Sequence[T]], Awaitable[list[Any]]],
        most: int | None = None,
    ) -> list[Any]:
        """Split items over `target` calls of `work`, or more calls of at most `most` items each,
        and return the results in the order of the items.

        Of n calls, call i gets every n-th item from i on. The content of a share, and with it the
        rounding of a batched computation, therefore does not depend on which replicas are alive.
        """
        count = min(max(self.target, -(-len(items) // (most or len(items) or 1))), len(items))
        shares = await gather(work(items[i::count]) for i in range(count))
        answers: list[Any] = [None] * len(items)
        for i, share in enumerate(shares):
            answers[i::count] = share
        return answers

    async def update(
        self, topic: str, version: int, method: str, *args: Any, keep: int = 1
    ) -> None:
        """Send every replica an update, and keep the newest `keep` of the topic for later replicas.

        Sending a version again replaces the kept update; replicas that have it do not get it again.
        A silent replica, or the successor of a dead one, gets it when it comes into service.
        """
        updates = [u for u in self.updates.get(topic, []) if u.version != version]
        updates.append(PoolUpdate(topic, version, method, args))
        self.remember(topic, sorted(updates, key=lambda u: u.version)[-keep:])
        await self.tell()

    def remember(self, topic: str, updates: Sequence[PoolUpdate]) -> None:
        """Set the updates of a topic that replicas receive at their start or the next `tell`."""
        # The topic that changed last is sent last: its update may need the earlier ones.
        self.updates.pop(topic, None)
        self.updates[topic] = list(updates)

    async def tell(self) -> None:
        """Send every replica in service its missed updates. Raises the first failure."""
        await gather(self.catch_up(r) for r in self.replicas if r.state is ReplicaState.HEALTHY)

    def scale(self, replicas: int) -> None:
        """Set the target and return at once. Replicas start or drain in the background. Raises
        RunError for fewer than one."""
        if replicas < 1:
            raise RunError(
                f"{self.role} cannot be scaled to {replicas} replicas; a pool has one at least, "
                "and ends with its service"
            )
        self.target = replicas
        self.resize(self)

    async def settled(self, timeout_s: float) -> None:
        """Wait until exactly `target` replicas exist and all are in service. Raises the reason at
        once when one cannot start, and TimeoutError with the replicas' states at the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.is_settled():
                    if self.failed is not None:
                        raise self.failed
                    await self._changed.wait()
        except TimeoutError as error:
            raise TimeoutError(
                f"{self.role} has not {self.target} replicas in service after {timeout_s:g} s "
                f"({self.states()})"
            ) from error

    def states(self) -> str:
        """Return the replicas with their states for messages: `"echo[0] dead, echo[1] healthy"`."""
        return ", ".join(f"{r.name} {r.state}" for r in self.replicas)

    def is_settled(self) -> bool:
        states = [r.state for r in self.replicas]
        return len(states) == self.target and set(states) <= {ReplicaState.HEALTHY}

    async def catch_up(self, replica: Replica) -> None:
        """Send a replica its missed updates. Returns early when the replica becomes silent or dies.

        A silent replica may still receive an update that was sent, and an update is never sent
        twice. So the pending call stays, and the next `catch_up` waits for the same call.
        """
        if replica.catching_up is None or replica.catching_up.done():
            replica.catching_up = asyncio.create_task(self._catch_up(replica))
            # Its failure is seen: a waiter raises it, or the next `catch_up` will.
            replica.catching_up.add_done_callback(lambda task: task.cancelled() or task.exception())
        telling = replica.catching_up
        while not telling.done():
            await asyncio.wait({telling}, timeout=DOUBT_SECONDS)
            if not telling.done() and replica.state is ReplicaState.SUSPECT:
                return
        telling.result()

    def forget(self, replica: Replica) -> None:
        """Remove a replica from the pool."""
        if replica in self.replicas:
            self.replicas.remove(replica)
        self.changed()

    def close(self, why: str) -> None:
        """End all replicas and all requests that wait for one; no further replica starts."""
        self.closed = why
        for replica in self.replicas:
            replica.end(why)
        self.changed()

    def changed(self) -> None:
        """Wake all requests that wait for a replica after a replica's state changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    def status(self) -> PoolStatus:
        waiting = sum(1 for r in self.in_flight.values() if not r.replica)
        replicas = tuple(
            ReplicaStatus(
                r.name, r.state, r.process.host if r.process else "",
                r.process.pid if r.process else 0, r.ongoing, r.version, r.memory_bytes,
            )
            for r in self.replicas
        )  # fmt: skip
        return PoolStatus(
            self.role, self.target, waiting, replicas, self.requests, self.failures,
            self.retries, self.restarts, self.engine_deaths,
        )  # fmt: skip

    async def _attempts(
        self,
        request: RequestStatus,
        args: tuple[Any, ...],
        session: str | None,
        deadline: float,
        limit: float,
    ) -> Any:
        why, deaths = "", 0
        for attempt in range(1, self.spec.attempts + 1):
            request.attempt, request.replica = attempt, ""
            suspect = deaths > 0
            arrival = start = steady_time()
            replica = self._free(session, suspect)
            if replica is None:
                replica = await self._seat(session, deadline, request, limit, suspect)
                start = steady_time()
            request.replica = replica.name
            outcome = "failed"
            replica.ongoing += 1
            replica.suspects += suspect
            try:
                answer = await ask(replica, request.method, args, deadline)
                self._note(answer)
                outcome = "ok"
                return answer
            except ReplicaLost as loss:
                why, outcome = loss.reason, "lost"
                self.report_death(replica, why)
                deaths += loss.suspect
                if deaths == SUSPECT_DEATHS:
                    raise EngineKilledError(
                        f"{self.role}.{request.method} is not tried again: {deaths} engines in "
                        f"turn died in a step that was over it, last: {why}; send something "
                        "shorter or simpler, or look for the cause in the log of the replicas"
                    ) from loss
                self.retries += attempt < self.spec.attempts
            except ReplicaTimeout as error:
                outcome = "timeout"
                raise RunError(self._silence(request, limit, "did not answer")) from error
            finally:
                replica.ongoing -= 1
                replica.suspects -= suspect
                if suspect or not replica.ongoing or self._seekers:
                    self.changed()
                facts: dict[str, str | int | float] = {
                    "request": request.id, "attempt": attempt, "outcome": outcome,
                    "waited": round(start - arrival, 6), "version": replica.version,
                }  # fmt: skip
                self._observe(TraceSpan(replica.name, request.method, start, steady_time(), facts))
        raise RunError(
            f"{self.role}.{request.method} was lost {self.spec.attempts} times with the replica "
            f"that worked on it, last: {why}; if the replicas are well, raise "
            f"roles.{self.role}.attempts"
        )

    async def _seat(
        self,
        session: str | None,
        deadline: float,
        request: RequestStatus,
        limit: float,
        suspect: bool,
    ) -> Replica:
        """Return a replica that may take a request, waiting for one until the deadline."""
        while (replica := self._free(session, suspect)) is None:
            ended = suspect or all(r.life.over for r in self.replicas)
            given_up = self.failed is not None and ended
            if why := self.closed or (str(self.failed) if given_up else ""):
                raise RunError(f"{request.method} found no {self.role}: {why}")
            self._seekers += 1
            try:
                async with asyncio.timeout(deadline - loop_time()):
                    await self._changed.wait()
            except TimeoutError as error:
                raise RunError(self._silence(request, limit, "found no replica")) from error
            finally:
                self._seekers -= 1
        return replica

    def _free(self, session: str | None, suspect: bool = False) -> Replica | None:
        """Return a replica that may take a request now; None where all have their most. A suspect
        gets one without another, while a further one serves without any; others keep away from
        suspects where they can."""
        most = self.spec.max_ongoing
        serving = [r for r in self.replicas if r.life.takes_requests]
        clear = [r for r in serving if not r.suspects]
        free = [r for r in clear if r.ongoing < most]
        if suspect:
            if len(clear) < min(2, self.target):
                return None
        elif not free:
            free = [r for r in serving if r.ongoing < most]
        return self._router.choose(free, session) if free else None

    async def _catch_up(self, replica: Replica) -> None:
        while missed := self.missed(replica):
            update = missed[0]
            try:
                await self._tell(replica, update.method, update.args)
            except ReplicaLost:
                return
            replica.told[update.topic] = update.version

    async def _tell(self, replica: Replica, method: str, args: tuple[Any, ...]) -> Any:
        """Call one replica outside routing. Raises ReplicaLost, RunError or the actor's error."""
        start = steady_time()
        outcome = "failed"
        try:
            answer = await ask(replica, method, args, loop_time() + self._timeout_s)
            self._note(answer)
            outcome = "ok"
            return answer
        except ReplicaLost as loss:
            outcome = "lost"
            self.report_death(replica, loss.reason)
            raise
        except ReplicaTimeout as error:
            outcome = "timeout"
            raise RunError(
                f"{replica.name}.{method} did not answer within {self._timeout_s:g} s; raise "
                "call_timeout_s in the mesh file if the work is really that long"
            ) from error
        finally:
            self._observe(
                TraceSpan(replica.name, method, start, steady_time(), {"outcome": outcome})
            )

    def _note(self, answer: Any) -> None:
        """Keep when the actor worked for a reply that arrives now, where it says how long."""
        if isinstance(answer, TimedReply):
            now = time.perf_counter()
            self.worked.append((now - answer.compute_seconds, now))

    def missed(self, replica: Replica) -> list[PoolUpdate]:
        """Return the updates that a replica has not received."""
        return [
            u
            for updates in self.updates.values()
            for u in updates
            if u.version > replica.told.get(u.topic, -1)
        ]

    def _silence(self, request: RequestStatus, limit: float, what: str) -> str:
        who = request.replica or self.role
        states = self.states() or "none"
        return (
            f"{who}.{request.method} {what} within {limit:g} s (request {request.id}, attempt "
            f"{request.attempt}; replicas: {states}); raise call_timeout_s in the mesh file if "
            "the work is really that long"
        )


async def gather(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await all calls, then raise the first failure, so that no call is left running."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)
