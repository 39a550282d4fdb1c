"""Simulate a mesh's steps as queues: one controller, Monarch's threads, and the tensor store.

    watch      every heartbeat_s: a pass over the replicas, then a beat of each
    step       rollout -> score -> train -> publish -> record
    a message  its sender's share of the loop, the way there and back, the answer's share

The controller's event loop and the store serve one thing at a time, first come first served; all
else only waits. Times are seconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace

PARTS = 16  # of a fan-out that are simulated one by one: more are simulated in groups
HORIZON = 20.0  # seconds of a publish's transfers that are simulated; the rest is extrapolated
OVERLOAD = 5.0  # seconds of a server's queue after HORIZON of health checks alone

# A task yields the time at which it continues, or the tasks that it awaits.
Task = Generator["float | list[Task]", None, None]


@dataclass
class SerialServer:
    """Process one item at a time, in the order of arrival."""

    free: float = 0.0
    busy: float = 0.0

    def takes(self, now: float, seconds: float) -> float:
        """Return the time at which work that arrives at `now` is done."""
        self.free = max(now, self.free) + seconds
        self.busy += seconds
        return self.free


class EventQueue:
    """Run tasks in the order of time, and at equal times in the order of arrival."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Task, Callable[[], None]]] = []
        self._order = itertools.count()

    def begin(self, task: Task, at: float = 0.0, then: Callable[[], None] = lambda: None) -> None:
        """Resume a task at time `at`, or now where that is past; call `then` at its end."""
        heapq.heappush(self._due, (max(at, self.now), next(self._order), task, then))

    def run(self, task: Task) -> float:
        """Run until this task has ended, among all others, and return the time of its end."""
        finished: list[float] = []
        self.begin(task, then=lambda: finished.append(self.now))
        while not finished:
            self.now, _, current, then = heapq.heappop(self._due)
            self._resume(current, then)
        return finished[0]

    def _resume(self, task: Task, then: Callable[[], None]) -> None:
        try:
            waiting = next(task)
        except StopIteration:
            then()
            return
        if not isinstance(waiting, list):
            self.begin(task, waiting, then)
            return
        pending = len(waiting)

        def one_less() -> None:
            nonlocal pending
            pending -= 1
            if not pending:
                self.begin(task, then=then)

        for awaited in waiting:
            self.begin(awaited, then=one_less)


@dataclass(frozen=True)
class MessageCost:
    """Hold the seconds on the loop to send one message, and to receive its reply."""

    send: float = 0.0
    receive: float = 0.0


@dataclass(frozen=True)
class MeasuredCosts:
    """Hold measured seconds: on the loop, except for `wire`, `trip`, `start_host` and the store's.

    `wire` is the time of Monarch's own threads for a message and its reply, taken as one thread.
    `seat`, `look` and `status` count once per replica of the pool: in every request's choice, in
    every heartbeat, in the check once a second. `start` is the loop's share of a process's start,
    `start_host` its host's. The store takes `store_fixed + bytes * store_byte` for a get. Relays
    take `relay_byte` for each byte of a publish over two hosts, and `relay_host` more for each
    further host.
    """

    beat: MessageCost = MessageCost()
    request: MessageCost = MessageCost()
    update: MessageCost = MessageCost()
    tick: float = 0.0
    look: float = 0.0
    seat: float = 0.0
    status: float = 0.0
    event: float = 0.0
    span: float = 0.0
    wire: float = 0.0
    trip: float = 0.0
    start: float = 0.0
    start_host: float = 0.0
    store_fixed: float = 0.0
    store_byte: float = 0.0
    relay_byte: float = 0.0
    relay_host: float = 0.0


@dataclass(frozen=True)
class MeshScale:
    """Describe a mesh of `hosts` with `replicas` readers each, and its step's model time.

    Of several hosts, with `relays` one hands a version on to the next, and with `beat_per_host` one
    heartbeat asks for all processes of a host, as in the product (docs/adr/0027 and 0029). The
    other options are plans: `kept_seats`, requests that do not look at every replica;
    `controllers` that share the replicas.
    """

    hosts: int
    replicas: int
    rollout: float
    score: float
    train: float
    published: int  # bytes
    heartbeat_s: float = 0.5
    relays: bool = True
    beat_per_host: bool = True
    kept_seats: bool = False
    controllers: int = 1

    @property
    def readers(self) -> int:
        return self.hosts * self.replicas

    @property
    def handed_on(self) -> bool:
        """Return whether relays carry a publish: where there are several hosts."""
        return self.relays and self.hosts > 1

    @property
    def compute(self) -> float:
        return self.rollout + self.score + self.train


@dataclass(frozen=True)
class StepOutcome:
    """Hold the steady state of a step. A server's share is its busy time over all time; `silence`
    is the longest time without a heartbeat of a healthy replica, as a health check sees it."""

    step: float
    dispatch: float
    publish: float
    loop_share: float
    wire_share: float
    store_share: float
    silence: float
    late_passes: float
    start: float


class SimulatedMesh:
    """Simulate one controller with its share of the replicas. `followed` is the share of a
    publish's transfers that is simulated."""

    def __init__(self, scale: MeshScale, costs: MeasuredCosts, followed: float = 1.0) -> None:
        self.scale, self.costs, self.followed = scale, costs, followed
        self.events, self.loop, self.wire = EventQueue(), SerialServer(), SerialServer()
        self.store = SerialServer()
        self.replicas = math.ceil(scale.readers / scale.controllers)
        self.heard: list[float] = []
        self.silence = 0.0
        self.passes = self.late = 0
        self.publishes: list[float] = []
        self.dispatches: list[float] = []

    def run(self, task: Task) -> float:
        self.events.begin(self._watch())
        self.events.begin(self._looks())
        return self.events.run(task)

    def rest(self, seconds: float) -> Task:
        yield self.events.now + seconds

    def steps(self, count: int) -> Task:
        scale, costs = self.scale, self.costs
        one = MessageCost(costs.request.send, costs.request.receive + costs.span)
        seats = 0 if scale.kept_seats else self.replicas
        many = replace(one, send=one.send + seats * costs.seat)
        update = MessageCost(costs.update.send, costs.update.receive + costs.span)
        for _ in range(count):
            start = self.events.now
            yield self._fan(many, lambda group, size: self.rest(scale.rollout))
            self.dispatches.append(self.events.now - start - scale.rollout)
            yield self._fan(one, lambda group, size: self.rest(scale.score), 1)
            yield self._fan(one, lambda group, size: self.rest(scale.train), 1)
            start = self.events.now
            yield self._fan(one, lambda group, size: self._put(), 1)
            yield self._fan(update, self._read)
            self.publishes.append(self.events.now - start)
            yield self._on(self.loop, costs.event)

    def _on(self, server: SerialServer, seconds: float) -> float:
        return server.takes(self.events.now, seconds)

    def _watch(self) -> Task:
        costs, scale = self.costs, self.scale
        by_host = scale.beat_per_host and scale.hosts > 1
        beats = math.ceil(scale.hosts / scale.controllers) if by_host else self.replicas
        groups = grouped(beats)
        self.heard = [0.0] * len(groups)
        due = 0.0
        while True:
            yield self._on(self.loop, 0.0)  # it wakes when the loop is free
            late = self.events.now - due > scale.heartbeat_s  # then the service judges no replica
            self.passes += 1
            self.late += late
            if not late:
                self.silence = max(self.silence, self.events.now - min(self.heard))
            yield self._on(self.loop, costs.tick + self.replicas * costs.look)
            for i, count in enumerate(groups):
                self.events.begin(self._beat(i, count))
            due = self.events.now + scale.heartbeat_s
            yield due

    def _beat(self, group: int, count: int) -> Task:
        yield from self._ask(self.costs.beat, count, ())
        self.heard[group] = self.events.now

    def _looks(self) -> Task:
        while True:
            yield self.events.now + 1.0
            yield self._on(self.loop, self.replicas * self.costs.status)

    def _fan(
        self, message: MessageCost, meanwhile: Callable[[int, int], Task], count: int | None = None
    ) -> list[Task]:
        """Send `count` messages at once, and receive all their replies."""
        groups = grouped(self.replicas if count is None else count)
        return [self._ask(message, n, meanwhile(group, n)) for group, n in enumerate(groups)]

    def _ask(
        self, message: MessageCost, count: int, meanwhile: Iterable[float | list[Task]]
    ) -> Task:
        yield self._on(self.loop, count * message.send)
        yield self._on(self.wire, count * self.costs.wire)
        yield self.events.now + self.costs.trip
        yield from meanwhile
        yield self._on(self.loop, count * message.receive)

    def _put(self) -> Task:
        yield self._on(self.store, self.followed * putting(self.scale, self.costs))

    def _read(self, group: int, count: int) -> Task:
        """Let `count` replicas get the published version."""
        seconds = self.followed * reading(self.scale, self.costs)
        if self.scale.handed_on:
            yield self.events.now + seconds
        else:
            yield self._on(self.store, seconds * count / self.replicas)


def _one_get(scale: MeshScale, costs: MeasuredCosts) -> float:
    return costs.store_fixed + scale.published * costs.store_byte


def putting(scale: MeshScale, costs: MeasuredCosts) -> float:
    """Return seconds of the trainer's put; 0 for relays, whose times include it."""
    return 0.0 if scale.handed_on else _one_get(scale, costs)


def reading(scale: MeshScale, costs: MeasuredCosts) -> float:
    """Return seconds until every reader has the version: along the chain of hosts, or one reader
    after the other from the store."""
    if scale.handed_on:
        return scale.published * costs.relay_byte + (scale.hosts - 2) * costs.relay_host
    return scale.readers * _one_get(scale, costs)


def grouped(count: int) -> list[int]:
    """Split `count` into at most PARTS nearly equal sizes: `20 -> [2, 2, 2, 2, 1, ...]`."""
    parts = min(count, PARTS)
    return [count // parts + (i < count % parts) for i in range(parts)] if parts else []


def simulate(scale: MeshScale, costs: MeasuredCosts, steps: int = 2) -> StepOutcome:
    """Simulate `steps` steps of the mesh, deterministically. Where the health checks alone exceed
    the loop's capacity, no step ends: `step` is infinite."""
    checks_only = SimulatedMesh(scale, costs)  # health checks alone
    watched = checks_only.run(checks_only.rest(HORIZON))
    start = checks_only.replicas * costs.start + scale.replicas * costs.start_host
    if max(checks_only.loop.free, checks_only.wire.free) > watched + OVERLOAD:
        loop, wire = (
            min(1.0, server.busy / watched) for server in (checks_only.loop, checks_only.wire)
        )
        never, late = math.inf, checks_only.late / checks_only.passes
        return StepOutcome(never, never, never, loop, wire, 0.0, never, late, start)
    transfer = putting(scale, costs) + reading(scale, costs)
    mesh = SimulatedMesh(scale, costs, followed=min(1.0, HORIZON / transfer) if transfer else 1.0)
    seconds = mesh.run(mesh.steps(steps))
    beyond = (1 - mesh.followed) * transfer * steps  # with health checks alone
    seconds_in_all = seconds + beyond
    return StepOutcome(
        step=seconds_in_all / steps,
        dispatch=mesh.dispatches[-1],
        publish=mesh.publishes[-1] + beyond / steps,
        loop_share=min(
            1.0, (mesh.loop.busy + checks_only.loop.busy * beyond / watched) / seconds_in_all
        ),
        wire_share=min(
            1.0, (mesh.wire.busy + checks_only.wire.busy * beyond / watched) / seconds_in_all
        ),
        store_share=min(
            1.0, (mesh.store.busy + (0 if scale.handed_on else beyond)) / seconds_in_all
        ),
        silence=mesh.silence,
        late_passes=mesh.late / mesh.passes,
        start=start,
    )
