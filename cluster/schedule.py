"""A mesh's step and watch as a queue: what one controller, and one tensor store, are asked of by N.

    watch      every heartbeat_s: a pass over the replicas, then a beat of each
    step       rollout -> score -> train -> publish -> record
    a message  its sender's share of the loop, the way there and back, the answer's share

The controller's event loop and each store serve one thing at a time, first come first served; all
else only waits. Costs are measured (benchmarks.controller_latency). Times are seconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace

PARTS = 16  # of a fan-out that are followed one by one: more are followed in groups
HORIZON = 20.0  # seconds of a publish's transfers that are followed; the rest is more of the same
OVERLOAD = 5.0  # seconds of work that lie before a server after HORIZON of the watch alone


@dataclass
class Server:
    """Does one thing at a time, in the order of arrival."""

    free: float = 0.0
    busy: float = 0.0

    def takes(self, now: float, seconds: float) -> float:
        """When work that arrives now is done."""
        self.free = max(now, self.free) + seconds
        self.busy += seconds
        return self.free


@dataclass(frozen=True)
class Work:
    server: Server
    seconds: float


@dataclass(frozen=True)
class Wait:
    seconds: float


@dataclass(frozen=True)
class Together:
    """Goes on when all of these have ended."""

    tasks: tuple[Task, ...]


Task = Generator["Work | Wait | Together", None, None]


class Events:
    """Runs tasks in the order of time; those of one time in the order in which they came."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Task]] = []
        self._order = itertools.count()
        self._joins: dict[int, Callable[[], None]] = {}

    def begin(self, task: Task, at: float | None = None) -> None:
        when = self.now if at is None else at
        heapq.heappush(self._due, (when, next(self._order), task))

    def run(self, task: Task) -> float:
        """Until this task has ended, whatever else goes on; returns when that was."""
        over: list[float] = []
        self._joins[id(task)] = lambda: over.append(self.now)
        self.begin(task)
        while not over:
            self.now, _, current = heapq.heappop(self._due)
            self._resume(current)
        return over[0]

    def _resume(self, task: Task) -> None:
        try:
            asked = next(task)
        except StopIteration:
            self._joins.pop(id(task), lambda: None)()
            return
        if isinstance(asked, Work):
            self.begin(task, asked.server.takes(self.now, asked.seconds))
        elif isinstance(asked, Wait):
            self.begin(task, self.now + asked.seconds)
        else:
            self._join(task, asked.tasks)

    def _join(self, waiting: Task, tasks: Sequence[Task]) -> None:
        left = len(tasks)

        def one_less() -> None:
            nonlocal left
            left -= 1
            if not left:
                self.begin(waiting)

        for task in tasks:
            self._joins[id(task)] = one_less
            self.begin(task)
        if not tasks:
            self.begin(waiting)


@dataclass(frozen=True)
class Message:
    """Seconds on the loop to send one, and to hear its answer."""

    send: float
    receive: float


@dataclass(frozen=True)
class Costs:
    """Measured, in seconds: on the loop, but for `wire`, `trip`, `start_host` and the store's.

    `wire` is what Monarch's own threads take for a message and its answer, taken as one thread.
    `seat`, `look` and `status` are for each replica of the pool: of every request's choice, of
    every heartbeat, of the look once a second. `start` is the loop's share of a process's start,
    `start_host` what its host takes. A store takes `store_fixed + bytes * store_byte` for a get.
    """

    beat: Message
    request: Message
    update: Message
    tick: float
    look: float
    seat: float
    status: float
    event: float
    span: float
    wire: float
    trip: float
    start: float
    start_host: float
    store_fixed: float
    store_byte: float


@dataclass(frozen=True)
class Scale:
    """A mesh of `hosts`, each with `replicas` readers of the cartridges, and its step's model time.

    What shards it: one beat a host in place of one a process, one get a host, `stores` that share
    the readers, `relays`: hosts pass on what they got, `kept_seats`: a request need not look at
    every replica, `controllers` that share the replicas.
    """

    hosts: int
    replicas: int
    rollout: float
    score: float
    train: float
    published: int  # bytes
    heartbeat_s: float = 0.5
    beat_per_host: bool = False
    get_per_host: bool = False
    stores: int = 1
    relays: bool = False
    kept_seats: bool = False
    controllers: int = 1

    @property
    def readers(self) -> int:
        return self.hosts * self.replicas

    @property
    def compute(self) -> float:
        return self.rollout + self.score + self.train


@dataclass(frozen=True)
class Outcome:
    """Of one step in the long run. A server's share is its busy time over all;
    `silence` is the longest that a replica in good health seemed silent to a pass that judges."""

    step: float
    dispatch: float
    publish: float
    loop_share: float
    wire_share: float
    store_share: float
    silence: float
    late_passes: float
    start: float

    def overhead(self, scale: Scale) -> float:
        """The share of a step that no model computes."""
        return 1 - scale.compute / self.step


@dataclass
class _Mesh:
    """One simulated controller with its share of the replicas."""

    scale: Scale
    costs: Costs
    events: Events = field(default_factory=Events)
    loop: Server = field(default_factory=Server)
    wire: Server = field(default_factory=Server)
    stores: list[Server] = field(default_factory=list)
    heard: list[float] = field(default_factory=list)
    silence: float = 0.0
    passes: int = 0
    late: int = 0
    followed: float = 1.0  # share of a publish's transfers
    publishes: list[float] = field(default_factory=list)
    dispatches: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stores = [Server() for _ in range(self.scale.stores)]

    @property
    def replicas(self) -> int:
        return math.ceil(self.scale.readers / self.scale.controllers)

    def run(self, task: Task) -> float:
        self.events.begin(self.watch())
        self.events.begin(self.looks())
        return self.events.run(task)

    def rest(self, seconds: float) -> Task:
        yield Wait(seconds)

    def watch(self) -> Task:
        costs, scale = self.costs, self.scale
        beats = math.ceil(scale.hosts / scale.controllers) if scale.beat_per_host else self.replicas
        groups = grouped(beats)
        self.heard = [0.0] * len(groups)
        due = 0.0
        while True:
            yield Work(self.loop, 0.0)  # it wakes when the loop comes to it
            late = self.events.now - due > scale.heartbeat_s  # then the service judges nobody
            self.passes += 1
            self.late += late
            if not late:
                self.silence = max(self.silence, self.events.now - min(self.heard))
            yield Work(self.loop, costs.tick + self.replicas * costs.look)
            for i, count in enumerate(groups):
                self.events.begin(self._beat(i, count))
            due = self.events.now + scale.heartbeat_s
            yield Wait(scale.heartbeat_s)

    def _beat(self, group: int, count: int) -> Task:
        yield Work(self.loop, count * self.costs.beat.send)
        yield Work(self.wire, count * self.costs.wire)
        yield Wait(self.costs.trip)
        yield Work(self.loop, count * self.costs.beat.receive)
        self.heard[group] = self.events.now

    def looks(self) -> Task:
        while True:
            yield Wait(1.0)
            yield Work(self.loop, self.replicas * self.costs.status)

    def steps(self, count: int) -> Task:
        scale, costs = self.scale, self.costs
        one = Message(costs.request.send, costs.request.receive + costs.span)
        seen = 0 if scale.kept_seats else self.replicas
        many = replace(one, send=one.send + seen * costs.seat)
        update = Message(costs.update.send, costs.update.receive + costs.span)
        for _ in range(count):
            begun = self.events.now
            yield from self._fan(many, lambda group, size: self._elsewhere(scale.rollout))
            self.dispatches.append(self.events.now - begun - scale.rollout)
            yield from self._fan(one, lambda group, size: self._elsewhere(scale.score), 1)
            yield from self._fan(one, lambda group, size: self._elsewhere(scale.train), 1)
            begun = self.events.now
            yield from self._fan(one, lambda group, size: self._spread(), 1)
            yield from self._fan(update, self._read)
            self.publishes.append(self.events.now - begun)
            yield Work(self.loop, costs.event)

    def _fan(
        self, message: Message, meanwhile: Callable[[int, int], Task], count: int | None = None
    ) -> Task:
        """So many messages at once, and all their answers."""
        groups = grouped(self.replicas if count is None else count)
        yield Together(
            tuple(
                self._ask(message, size, meanwhile(group, size))
                for group, size in enumerate(groups)
            )
        )

    def _ask(self, message: Message, count: int, meanwhile: Task) -> Task:
        yield Work(self.loop, count * message.send)
        yield Work(self.wire, count * self.costs.wire)
        yield Wait(self.costs.trip)
        yield from meanwhile
        yield Work(self.loop, count * message.receive)

    def _elsewhere(self, seconds: float) -> Task:
        yield Wait(seconds)

    def _spread(self) -> Task:
        yield Work(self.stores[0], self.followed * spreading(self.scale, self.costs))

    def _read(self, group: int, count: int) -> Task:
        """So many replicas get what was published."""
        seconds = self.followed * reading(self.scale, self.costs)
        if self.scale.relays:
            yield Wait(seconds)
        else:
            here = count * self.scale.stores / self.replicas  # of one store's readers
            yield Work(self.stores[group % len(self.stores)], here * seconds)


def _one_get(scale: Scale, costs: Costs) -> float:
    return costs.store_fixed + scale.published * costs.store_byte


def spreading(scale: Scale, costs: Costs) -> float:
    """Seconds of the trainer's put and its copies to the other stores: each round doubles them."""
    return (1 + math.ceil(math.log2(scale.stores))) * _one_get(scale, costs)


def reading(scale: Scale, costs: Costs) -> float:
    """Seconds until every reader has what lies in the stores: in turn, or in rounds that double
    the hosts that have it."""
    if scale.relays:
        return math.ceil(math.log2(scale.hosts + 1)) * _one_get(scale, costs)
    gets = scale.hosts if scale.get_per_host else scale.readers
    return gets / scale.stores * _one_get(scale, costs)


def grouped(count: int) -> list[int]:
    """`count` as at most PARTS sizes, as equal as can be: `20 -> [2, 2, 2, 2, 1, ...]`."""
    parts = min(count, PARTS)
    return [count // parts + (i < count % parts) for i in range(parts)] if parts else []


def simulate(scale: Scale, costs: Costs, steps: int = 2) -> Outcome:
    """The mesh at work for so many steps. The same every time: nothing is drawn.

    Where the watch alone is more than can be served, no step ends: `step` is infinite.
    """
    alone = _Mesh(scale, costs)  # nothing but the watch
    watched = alone.run(alone.rest(HORIZON))
    start = alone.replicas * costs.start + scale.replicas * costs.start_host
    if max(alone.loop.free, alone.wire.free) > watched + OVERLOAD:
        return Outcome(
            step=math.inf, dispatch=math.inf, publish=math.inf,
            loop_share=min(1.0, alone.loop.busy / watched),
            wire_share=min(1.0, alone.wire.busy / watched),
            store_share=0.0, silence=math.inf, late_passes=alone.late / alone.passes, start=start,
        )  # fmt: skip
    transfer = spreading(scale, costs) + reading(scale, costs)
    mesh = _Mesh(scale, costs, followed=min(1.0, HORIZON / transfer) if transfer else 1.0)
    seconds = mesh.run(mesh.steps(steps))
    beyond = (1 - mesh.followed) * transfer * steps  # nothing but the watch goes on then
    loop = mesh.loop.busy + alone.loop.busy * beyond / watched
    wire = mesh.wire.busy + alone.wire.busy * beyond / watched
    whole = seconds + beyond
    return Outcome(
        step=whole / steps,
        dispatch=mesh.dispatches[-1],
        publish=mesh.publishes[-1] + beyond / steps,
        loop_share=min(1.0, loop / whole),
        wire_share=min(1.0, wire / whole),
        store_share=min(1.0, (max(s.busy for s in mesh.stores) + beyond) / whole),
        silence=mesh.silence,
        late_passes=mesh.late / mesh.passes,
        start=start,
    )


def breaks_at(broken: Callable[[int], bool], most: int) -> int | None:
    """The fewest hosts at which a limit is broken, up to `most`; None where it holds. A limit that
    is broken stays broken with more hosts."""
    if not broken(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if broken(middle) else (middle, high)
    return high


def doubling(most: int) -> Iterable[int]:
    """1, 2, 4, ... and `most` itself."""
    yield from itertools.takewhile(lambda n: n < most, (2**i for i in itertools.count()))
    yield most
