"""From 1 to 1,000 hosts: what one controller and one tensor store would bear, simulated.

    python -m benchmarks.controller_simulation [meshes/longhealth_3b.yaml] [--set KEY=VALUE]...
        [--replicas 8] [--byte-rate 3e9] [--latencies benchmarks/controller_latency.json]

    watch      every heartbeat_s: a pass over the replicas, then a beat of each
    step       rollout -> score -> train -> publish -> record
    a message  its sender's share of the loop, the way there and back, the answer's share

The controller's event loop and each store serve one thing at a time, first come first served; all
else only waits. Costs are those that benchmarks.controller_latency measured; model times are the
plan's roofline of one step on A100s. Times are seconds.

Every host has `--replicas` generators and gets as many prompts as the mesh file gives each of its
own, so a step's model time stays as it is: teachers and trainer are taken to grow along, which they
do not yet, and `one trainer` says what the one there is would take. `--byte-rate` puts the store on
a faster link than was measured.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.record import benchmark, read
from forge_run.formatting import TableSection, bytes_text, markdown_table, seconds_text
from forge_run.plan.plan import step_workload
from forge_run.plan.roofline import A100
from protocols.errors import SpecError
from protocols.spec.loading import load_spec
from protocols.spec.mesh import RunSpec

LATENCIES = Path(__file__).with_name("controller_latency.json")
MOST_HOSTS = 1000
LOOP_LIMIT = 0.5  # of the loop: beyond it waiting times grow fast
SHARE_LIMIT = 0.1  # of the step's model time
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
        over: list[float] = []
        self.begin(task, then=lambda: over.append(self.now))
        while not over:
            self.now, _, current, then = heapq.heappop(self._due)
            self._resume(current, then)
        return over[0]

    def _resume(self, task: Task, then: Callable[[], None]) -> None:
        try:
            asked = next(task)
        except StopIteration:
            then()
            return
        if not isinstance(asked, list):
            self.begin(task, asked, then)
            return
        left = len(asked)

        def one_less() -> None:
            nonlocal left
            left -= 1
            if not left:
                self.begin(task, then=then)

        for awaited in asked:
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
    `start_host` its host's. A store takes `store_fixed + bytes * store_byte` for a get.
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


@dataclass(frozen=True)
class MeshScale:
    """Describe a mesh of `hosts` with `replicas` readers each, and its step's model time.

    Options that shard the work: one heartbeat and one get per host in place of one per process;
    `stores` that share the readers; `relays`, hosts that forward a version; `kept_seats`, requests
    that do not look at every replica; `controllers` that share the replicas.
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
        self.stores = [SerialServer() for _ in range(scale.stores)]
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
        seen = 0 if scale.kept_seats else self.replicas
        many = replace(one, send=one.send + seen * costs.seat)
        update = MessageCost(costs.update.send, costs.update.receive + costs.span)
        for _ in range(count):
            begun = self.events.now
            yield self._fan(many, lambda group, size: self.rest(scale.rollout))
            self.dispatches.append(self.events.now - begun - scale.rollout)
            yield self._fan(one, lambda group, size: self.rest(scale.score), 1)
            yield self._fan(one, lambda group, size: self.rest(scale.train), 1)
            begun = self.events.now
            yield self._fan(one, lambda group, size: self._spread(), 1)
            yield self._fan(update, self._read)
            self.publishes.append(self.events.now - begun)
            yield self._on(self.loop, costs.event)

    def _on(self, server: SerialServer, seconds: float) -> float:
        return server.takes(self.events.now, seconds)

    def _watch(self) -> Task:
        costs, scale = self.costs, self.scale
        beats = math.ceil(scale.hosts / scale.controllers) if scale.beat_per_host else self.replicas
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

    def _spread(self) -> Task:
        yield self._on(self.stores[0], self.followed * spreading(self.scale, self.costs))

    def _read(self, group: int, count: int) -> Task:
        """Let `count` replicas get the published version."""
        seconds = self.followed * reading(self.scale, self.costs)
        if self.scale.relays:
            yield self.events.now + seconds
        else:
            here = count * self.scale.stores / self.replicas  # of one store's readers
            yield self._on(self.stores[group % len(self.stores)], here * seconds)


def _one_get(scale: MeshScale, costs: MeasuredCosts) -> float:
    return costs.store_fixed + scale.published * costs.store_byte


def spreading(scale: MeshScale, costs: MeasuredCosts) -> float:
    """Return seconds of the trainer's put and its copies to the other stores, which double per
    round."""
    return (1 + math.ceil(math.log2(scale.stores))) * _one_get(scale, costs)


def reading(scale: MeshScale, costs: MeasuredCosts) -> float:
    """Return seconds until every reader has the stores' version: in turn, or in rounds that double
    the hosts that have it."""
    if scale.relays:
        return math.ceil(math.log2(scale.hosts + 1)) * _one_get(scale, costs)
    gets = scale.hosts if scale.get_per_host else scale.readers
    return gets / scale.stores * _one_get(scale, costs)


def grouped(count: int) -> list[int]:
    """Split `count` into at most PARTS nearly equal sizes: `20 -> [2, 2, 2, 2, 1, ...]`."""
    parts = min(count, PARTS)
    return [count // parts + (i < count % parts) for i in range(parts)] if parts else []


def simulate(scale: MeshScale, costs: MeasuredCosts, steps: int = 2) -> StepOutcome:
    """Simulate `steps` steps of the mesh, deterministically. Where the health checks alone exceed
    the loop's capacity, no step ends: `step` is infinite."""
    alone = SimulatedMesh(scale, costs)  # health checks alone
    watched = alone.run(alone.rest(HORIZON))
    start = alone.replicas * costs.start + scale.replicas * costs.start_host
    if max(alone.loop.free, alone.wire.free) > watched + OVERLOAD:
        loop, wire = (min(1.0, server.busy / watched) for server in (alone.loop, alone.wire))
        never, late = math.inf, alone.late / alone.passes
        return StepOutcome(never, never, never, loop, wire, 0.0, never, late, start)
    transfer = spreading(scale, costs) + reading(scale, costs)
    mesh = SimulatedMesh(scale, costs, followed=min(1.0, HORIZON / transfer) if transfer else 1.0)
    seconds = mesh.run(mesh.steps(steps))
    beyond = (1 - mesh.followed) * transfer * steps  # with health checks alone
    whole = seconds + beyond
    return StepOutcome(
        step=whole / steps,
        dispatch=mesh.dispatches[-1],
        publish=mesh.publishes[-1] + beyond / steps,
        loop_share=min(1.0, (mesh.loop.busy + alone.loop.busy * beyond / watched) / whole),
        wire_share=min(1.0, (mesh.wire.busy + alone.wire.busy * beyond / watched) / whole),
        store_share=min(1.0, (max(s.busy for s in mesh.stores) + beyond) / whole),
        silence=mesh.silence,
        late_passes=mesh.late / mesh.passes,
        start=start,
    )


def breaks_at(broken: Callable[[int], bool], most: int) -> int | None:
    """Return the fewest hosts, up to `most`, at which a limit is broken; None where it holds. A
    broken limit stays broken with more hosts."""
    return 1 + bisect_left(range(1, most + 1), True, key=broken) if broken(most) else None


# Each limit of a mesh, and whether an outcome breaks it.
LIMITS: Mapping[str, Callable[[MeshScale, StepOutcome, RunSpec], bool]] = {
    "publish over 10%": lambda s, o, _: o.publish > SHARE_LIMIT * s.compute,
    "requests over 10%": lambda s, o, _: o.dispatch > SHARE_LIMIT * s.compute,
    "Monarch over 50%": lambda s, o, _: o.wire_share > LOOP_LIMIT,
    "loop over 50%": lambda s, o, _: o.loop_share > LOOP_LIMIT,
    "healthy are suspected": lambda s, o, m: o.silence > suspected(s, m),
    "start over spawn_timeout_s": lambda s, o, m: o.start > m.mesh.spawn_timeout_s,
    "too late to judge": lambda s, o, _: o.late_passes > 0.5,
}
_PASSED_ON = {"relays": True, "kept_seats": True, "beat_per_host": True}
REMEDIES: Mapping[str, Mapping[str, Any]] = {
    "as it is": {},
    "4 stores": {"stores": 4},
    "one get a host": {"get_per_host": True},
    "hosts pass it on": {"relays": True},
    "kept seats": {"kept_seats": True},
    "heartbeat 5 s, suspicion 20 s": {"heartbeat_s": 5.0},
    "one heartbeat a host": {"beat_per_host": True},
    "8 controllers": {"controllers": 8},
    "passed on, kept seats, one heartbeat a host": _PASSED_ON,
    "all of it": _PASSED_ON | {"controllers": 8},
}


def suspected(scale: MeshScale, spec: RunSpec) -> float:
    """Return the seconds of silence that make a replica SUSPECT; they grow with the heartbeat."""
    health = spec.mesh.health
    return health.suspect_after_s * scale.heartbeat_s / health.heartbeat_s


def costs_from(measured: Mapping[str, Any], byte_rate: float = 0.0) -> MeasuredCosts:
    """Return the costs measured with the most replicas."""
    last = {name: rows[-1] for name, rows in measured.items() if isinstance(rows, list)}

    def message(name: str) -> MessageCost:
        return MessageCost(last[name]["send_s"], last[name]["receive_s"])

    alone, most, look = measured["calls"][0], last["calls"], last["looks"]
    small, large = measured["store"][0], last["store"]
    of_four = (large["get_4_s"] - small["get_4_s"]) / (large["bytes"] - small["bytes"]) / 4
    return MeasuredCosts(
        beat=message("beats"),
        request=message("routes"),
        update=message("updates"),
        tick=measured["idle_s"],
        look=look["settled_s"] / look["replicas"],
        seat=last["seats"]["loop_s"] / last["seats"]["replicas"],
        status=look["status_s"] / look["replicas"],
        event=measured["records"]["event_s"],
        span=measured["records"]["span_s"],
        wire=max(0.0, most["process_s"] - most["send_s"] - most["receive_s"]),
        trip=max(0.0, alone["wall_s"] - alone["send_s"] - alone["receive_s"]),
        start=last["starts"]["loop_s"] / last["starts"]["processes"],
        start_host=last["starts"]["wall_s"] / last["starts"]["processes"],
        store_fixed=small["get_4_s"] / 4,
        store_byte=1 / byte_rate if byte_rate else of_four,
    )


def scale_of(spec: RunSpec, replicas: int) -> MeshScale:
    """Return one host of this mesh. Raises SpecError where the plan has no roofline for it."""
    phases = {low.name: low for low, _ in step_workload(spec)}
    if not phases:
        raise SpecError(
            f"{spec.mesh.name} has no roofline to take a step's model time from; choose a mesh of "
            "document distillation whose model's shape and data.document_tokens are known"
        )
    return MeshScale(
        hosts=1,
        replicas=replicas,
        rollout=phases["rollout"].seconds(A100),
        score=phases["teacher"].seconds(A100),
        train=phases["student"].seconds(A100),
        published=round(phases["publish"].bytes),
        heartbeat_s=spec.mesh.health.heartbeat_s,
    )


def limits(
    spec: RunSpec, scale: MeshScale, costs: MeasuredCosts, most: int = MOST_HOSTS
) -> dict[str, Any]:
    """Return the fewest hosts at which each limit breaks, by remedy; None where it holds."""
    outcome = cache(lambda grown: simulate(grown, costs))

    def first(limit: str, remedy: Mapping[str, Any]) -> int | None:
        def broken(hosts: int) -> bool:
            grown = replace(scale, hosts=hosts, **remedy)
            found = outcome(grown)
            # Where no step ends, every limit is broken.
            return not math.isfinite(found.step) or LIMITS[limit](grown, found, spec)

        return breaks_at(broken, most)

    return {
        name: {limit: first(limit, remedy) for limit in LIMITS} for name, remedy in REMEDIES.items()
    }


def checks(measured: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return ratios of simulated to measured times, of a real service on one machine; 1 is exact.
    There replicas and controller share the cores: a message costs all of them `wall_s`."""
    calls = measured["calls"][-1]
    costs = replace(costs_from(measured), wire=calls["wall_s"] / calls["replicas"], span=0.0)
    # An update without a store costs its messages alone.
    still = replace(costs, store_fixed=0.0, store_byte=0.0)
    rows = []
    for real in measured["checks"]:
        n, beat = real["replicas"], real["heartbeat_s"]
        idle = MeshScale(n, 1, rollout=4.0, score=0, train=0, published=0, heartbeat_s=beat)
        quiet = replace(idle, rollout=0.0, heartbeat_s=1e6)
        done = simulate(quiet, still, steps=1)
        update = done.publish - simulate(replace(quiet, hosts=1), still, 1).publish / 2
        rows.append(
            {
                "replicas": n,
                "loop": simulate(idle, costs, steps=1).loop_share / real["loop_share"],
                "split": done.dispatch / real["split_s"],
                "update": update / real["update_s"],
            }
        )
    return rows


# Each column of the table of hosts, and its text.
COLUMNS: Mapping[str, Callable[[MeshScale, StepOutcome], str]] = {
    "hosts": lambda s, o: f"{s.hosts:,}",
    "step": lambda s, o: _shown(o.step),
    "overhead": lambda s, o: f"{1 - s.compute / o.step:.0%}",
    "publish": lambda s, o: _shown(o.publish),
    "requests": lambda s, o: _shown(o.dispatch),
    "store": lambda s, o: f"{o.store_share:.0%}",
    "loop": lambda s, o: f"{o.loop_share:.1%}",
    "Monarch": lambda s, o: f"{o.wire_share:.0%}",
    "silence": lambda s, o: _shown(o.silence),
    "start": lambda s, o: seconds_text(o.start),
    "one trainer": lambda s, o: seconds_text(s.hosts * s.train),
}


def _shown(seconds: float) -> str:
    return seconds_text(seconds) if math.isfinite(seconds) else "never"


def measure(asked: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    """Print and return a step from 1 to MOST_HOSTS hosts, and where each limit breaks."""
    origin = read(asked.latencies)
    spec = load_spec(asked.mesh, sets=asked.set).spec
    scale, costs = scale_of(spec, asked.replicas), costs_from(origin["results"], asked.byte_rate)
    doubling = [1 << i for i in range(MOST_HOSTS.bit_length())]
    grown = [replace(scale, hosts=hosts) for hosts in (*doubling, MOST_HOSTS)]
    outcomes = [simulate(each, costs) for each in grown]
    broken, ratios = limits(spec, scale, costs), checks(origin["results"])
    print(
        f"costs: {asked.latencies.name}, {origin['device']['name']}, {origin['commit'][:12]}\n"
        f"{scale.replicas} generators a host; model time {seconds_text(scale.compute)} a step; "
        f"{bytes_text(scale.published)} published to each\n"
    )
    cells = (
        tuple(shown(*at) for shown in COLUMNS.values()) for at in zip(grown, outcomes, strict=True)
    )
    print(markdown_table(TableSection("", tuple(COLUMNS), tuple(cells))) + "\n")
    columns = ("breaks at hosts", *LIMITS)
    held = (
        (remedy, *("holds" if hosts is None else f"{hosts:,}" for hosts in at.values()))
        for remedy, at in broken.items()
    )
    print(markdown_table(TableSection("", columns, tuple(held))))
    print("\nsimulated over measured, one machine:")
    for found in ratios:
        print("  " + ", ".join(f"{name} {value:.2f}" for name, value in found.items()))
    rows = [
        {"hosts": at.hosts, "replicas": at.readers, **asdict(outcome)}
        | {"overhead": 1 - at.compute / outcome.step, "one_trainer": at.hosts * at.train}
        for at, outcome in zip(grown, outcomes, strict=True)
    ]
    return {}, {"rows": rows, "breaks_at": broken, "checks": ratios}


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {
            "mesh": {"nargs": "?", "default": "meshes/longhealth_3b.yaml"},
            "--set": {"action": "append", "default": [], "metavar": "KEY=VALUE"},
            "--replicas": (8, "generators a host"),
            "--byte-rate": (0.0, "bytes/s of the store, in place of measured"),
            "--latencies": LATENCIES,
        },
    )
