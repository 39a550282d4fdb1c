"""Chaos over whole runs: replicas are killed and stopped while a run goes on, as a seed decides.

    blows = draw(random.Random(7), points(reference), 20, controllers=2)
    outcome = storm(root, blows, **sets)

A blow falls once the run has come to a point (a step, an evaluation), or in a phase there. Every
role of ROLES is struck: a role that comes later joins by one line.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from small_run import Running, command, latest, running

from cartridge_forge.plugins.watch.commands.control_client import ControlClient, ControlTarget
from cartridge_forge.plugins.watch.control.endpoints import read_endpoints
from cartridge_forge.protocols.errors import ControlError
from cartridge_forge.protocols.files import read_rows
from cartridge_forge.protocols.records.status import ReplicaStatus, RunStatus


@dataclass(frozen=True)
class Role:
    """Something that dies. `goal_s` is the promised median from kill -9 to HEALTHY again. What is
    `resumed` ends the run, which goes on with --resume; all others are replaced by the service.
    Those `of_channels` are of runs that learn from episodes alone (test_three_channels), those
    `of_rsa` of runs that learn from recursive self-aggregation (test_rsagent), those `of_rewards`
    of runs whose rewards are the user's (test_examples_rows)."""

    name: str
    goal_s: float | None = None
    resumed: bool = False
    of_channels: bool = False
    of_rsa: bool = False
    of_rewards: bool = False


ROLES = (
    Role("generator", goal_s=2.0),
    Role("doc_teacher"),
    Role("trainer", goal_s=10.0),
    Role("store"),
    Role("controller", resumed=True),
    Role("sdpo_teacher", of_channels=True),
    Role("environment", of_channels=True),
    Role("teacher_replay", of_channels=True),
    Role("rsa_aggregator", of_rsa=True),
    Role("reward", of_rewards=True),
)
REPLACED = tuple(
    role.name
    for role in ROLES
    if not (role.resumed or role.of_channels or role.of_rsa or role.of_rewards)
)
OF_CHANNELS = tuple(role.name for role in ROLES if role.of_channels)

# What is silent is found fast, and nobody's budget ends a storm.
HASTY: dict[str, Any] = {
    "health.heartbeat_s": 0.3,
    "health.suspect_after_s": 1.0,
    "health.dead_after_s": 3.0,
    "spares": 1,
    **{f"roles.{name}.restarts": 1000 for name in ("generator", "doc_teacher", "trainer")},
}

Kind = Literal["kill", "stop", "pause"]
Point = tuple[int, int]  # stage, step; what events.jsonl says of how far a run has come
STAGES = ("run_started", "role_ready", "untrained", "on_policy", "on_policy!", "none", "document",
          "written", "offline", "offline!")  # fmt: skip
LOOK_SECONDS = 0.01
LAST_POINTS = 8
GONE_SECONDS = 120.0


@dataclass(frozen=True)
class Blow:
    """`kill` is SIGKILL, `stop` SIGSTOP, and `pause` SIGSTOP that ends after `pause_s` seconds.

    It falls `delay_s` seconds after the run came to `point`, or in the first `phase` after that, or
    right after one that is over before it is seen. The phase "checkpoint" is the time in which one
    is written. `replica` counts round the living.
    """

    point: Point
    role: str
    kind: Kind = "kill"
    delay_s: float = 0.0
    pause_s: float = 0.0
    replica: int = 0
    phase: str = ""


@dataclass
class Storm:
    """What was done to a run, and how it ended. `log` has a line for every act."""

    root: Path
    log: list[str] = field(default_factory=list)
    struck: list[Blow] = field(default_factory=list)
    code: int = -1
    said: str = ""

    def note(self, line: str) -> None:
        self.log.append(f"{time.strftime('%H:%M:%S')}.{int(time.time() % 1 * 1000):03d} {line}")

    def story(self) -> str:
        """All that explains a failure: acts, deaths and returns, and the last words."""
        events = read_rows(latest(self.root) / "events.jsonl")
        told = ("replica_lost", "replica_back", "failed", "stalled", "run_started", "finished")
        deaths = [json.dumps(e) for e in events if e["event"] in told]
        return "\n".join([*self.log, *deaths, f"exit code {self.code}", self.said[-3000:]])


def point_of(event: dict[str, Any]) -> Point | None:
    """How far a run has come that tells of this."""
    match event:
        case {"event": "run_started" | "role_ready" as name}:
            return STAGES.index(name), 0
        case {"event": "evaluated", "arm": "on_policy" | "offline" as arm}:
            return STAGES.index(f"{arm}!"), 0
        case {"event": "evaluated", "arm": arm}:
            return STAGES.index(arm), 0
        case {"event": "step", "arm": arm, "step": step}:
            return STAGES.index(arm), step
        case {"event": "checkpoint", "arm": "offline", "step": 0}:
            return STAGES.index("written"), 0
    return None


def points(run: Path) -> list[Point]:
    """Every point that this run came by, but the last few: after those a blow may come too late."""
    found = {p for e in read_rows(run / "events.jsonl") if (p := point_of(e)) is not None}
    return sorted(found)[:-LAST_POINTS]


def draw(rng: random.Random, where: Sequence[Point], count: int, controllers: int) -> list[Blow]:
    """`count` blows in the order of their points, `controllers` of them at the controller. Half of
    them fall at a random step, and half in a random stage, of which most have no steps."""
    blows = []
    for i in range(count):
        kind: Kind = rng.choice(("kill", "kill", "kill", "stop", "pause"))
        stage = rng.choice(sorted({stage for stage, _ in where}))
        point = rng.choice([p for p in where if p[0] == stage] if i % 2 else where)
        blows.append(
            Blow(
                point=point,
                role="controller" if i < controllers else rng.choice(REPLACED),
                kind="kill" if i < controllers else kind,
                delay_s=rng.uniform(0, 4)
                if point[0] == 0
                else rng.choice((0, rng.uniform(0, 0.3))),
                pause_s=rng.choice((0.3, 1.5, 2.5)),  # unseen, a doubt, almost a death
                replica=rng.randrange(8),
            )
        )
    return sorted(blows, key=lambda blow: blow.point)


def storm(
    root: Path, blows: Iterable[Blow], timeout: float = 280.0, resume: bool = True, **sets: Any
) -> Storm:
    """A run under these blows to its end; resumed after each of the controller's, if `resume`.

    Fails when anything of the run outlives it, or when a blow finds nothing to strike.
    """
    done, todo = Storm(root), list(blows)
    deadline = time.monotonic() + timeout
    extra: tuple[str, ...] = ()
    starts = 0
    while True:
        with running(command(root, *extra, **sets), root) as run:
            eye = Eye(run, deadline, starts)
            struck = _strike_until_down(eye, done, todo)
            left = max(1.0, deadline - time.monotonic())
            done.said, _ = run.process.communicate(timeout=left)
            done.code = run.process.returncode
            eye.close()
            run.wait_until_gone(GONE_SECONDS)
        if not struck or not resume:
            assert not todo, f"the run ended before {todo[0]}\n{done.story()}"
            return done
        done.note("resume")
        starts += 1
        extra = ("--resume",)


def _strike_until_down(eye: Eye, done: Storm, todo: list[Blow]) -> bool:
    """Let fall what falls; True once the controller was struck, False when the run has ended."""
    while todo and eye.wait(lambda: eye.furthest() >= todo[0].point, to_end=True):
        blow = todo.pop(0)
        eye.idle(blow.delay_s)
        if blow.phase and not eye.wait(lambda b=blow: eye.came(b.phase, b.point), to_end=True):
            raise AssertionError(f"no phase {blow.phase} came for {blow}\n{done.story()}")
        name, pid = eye.victim(blow, done)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if blow.kind == "kill" else signal.SIGSTOP)
        done.note(f"{blow.kind} {name} (process {pid}) at {eye.furthest()} {blow}")
        done.struck.append(blow)
        if blow.kind == "pause":
            eye.wake_after(pid, blow.pause_s)
        if blow.role == "controller":
            return True
    eye.wait(lambda: False, to_end=True)
    return False


class Eye:
    """Watches one run from outside: its events, its control plane; wakes what was paused.

    `starts` are those of the run before this one, which is a resumed run then.
    """

    def __init__(self, run: Running, deadline: float, starts: int = 0) -> None:
        self.run = run
        self._deadline = deadline
        self._starts = starts
        self._client: ControlClient | None = None
        self._asleep: list[tuple[float, int]] = []
        self._furthest: Point = (-1, 0)

    def events(self) -> list[dict[str, Any]]:
        return read_rows(latest(self.run.root) / "events.jsonl")

    def up(self) -> bool:
        return sum(e["event"] == "run_started" for e in self.events()) > self._starts

    def furthest(self) -> Point:
        """The furthest point that the run, or the one that it resumes, came to; before this one is
        up, none."""
        if self.up():
            told = [p for e in self.events() if (p := point_of(e)) is not None]
            self._furthest = max([self._furthest, *told])
        return self._furthest

    def status(self) -> RunStatus | None:
        """How the run says it stands; None while it says nothing."""
        try:
            if self._client is None:
                run = latest(self.run.root)
                if not self.up():
                    return None
                self._client = ControlClient(ControlTarget(read_endpoints(run).control, run))
            return self._client.status()[1]
        except ControlError:
            self.close()
            return None

    def replicas(self, role: str) -> list[ReplicaStatus]:
        status = self.status()
        pools = () if status is None else status.pools
        return [r for pool in pools if pool.role == role for r in pool.replicas if r.pid]

    def victim(self, blow: Blow, done: Storm) -> tuple[str, int]:
        """Name and process of whom the blow falls on, once there is one."""
        if blow.role == "controller":
            self.wait(lambda: self.status() is not None)
            return "controller", read_endpoints(latest(self.run.root)).pid
        found: list[ReplicaStatus] = []

        def look() -> bool:
            # A stopped process that is being started is only found by its start's own timeout.
            living = self.replicas(blow.role)
            found[:] = [r for r in living if blow.kind == "kill" or r.state != "dead"]
            return bool(found)

        if not self.wait(look, to_end=True):
            raise AssertionError(f"the run ended before {blow}\n{done.story()}")
        chosen = found[blow.replica % len(found)]
        return chosen.name, chosen.pid

    def came(self, phase: str, point: Point) -> bool:
        """Whether the phase is in progress, or ended since the run came to the point: it may be
        shorter than two looks are apart, and the trace has every one that ended."""
        if phase == "checkpoint":
            partial = (latest(self.run.root) / "checkpoints").glob(".version-*.partial")
            return any(partial) or self.written_since(point)
        status = self.status()
        if status is not None and status.phase == phase:
            return True
        since = self.time_of(point)
        return any(s["name"] == phase and s["ts"] / 1e6 >= since for s in self.phases())

    def time_of(self, point: Point) -> float:
        """When the run came to the point, in seconds of the epoch."""
        times = [e["time"] for e in self.events() if (p := point_of(e)) is not None and p >= point]
        return datetime.fromisoformat(times[0]).timestamp()

    def written_since(self, point: Point) -> bool:
        """Whether a checkpoint was written after the run came to the point."""
        events = self.events()
        first = next(i for i, e in enumerate(events) if (p := point_of(e)) and p >= point)
        return any(e["event"] == "checkpoint" for e in events[first:])

    def phases(self) -> list[dict[str, Any]]:
        """The phases that have ended, as the trace has them in its first lane, the controller's; a
        torn last line is passed over."""
        found = []
        for line in (latest(self.run.root) / "trace.json").read_bytes().splitlines():
            with suppress(ValueError):
                span = json.loads(line.strip().strip(b","))
                if isinstance(span, dict) and (span.get("ph"), span.get("tid")) == ("X", 1):
                    found.append(span)
        return found

    def wait(self, condition: Callable[[], bool], to_end: bool = False) -> bool:
        """True once the condition holds; with `to_end`, False once the run has ended."""
        while not condition():
            if self.run.process.poll() is not None:
                assert to_end, "the run has ended"
                return False
            assert time.monotonic() < self._deadline, f"it took too long, at {self.furthest()}"
            self.idle(LOOK_SECONDS)
        return True

    def idle(self, seconds: float) -> None:
        """Let time pass, and wake who is due."""
        until = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            for due, pid in [a for a in self._asleep if a[0] <= now]:
                self._asleep.remove((due, pid))
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            if now >= until:
                return
            time.sleep(min(LOOK_SECONDS, until - now))

    def wake_after(self, pid: int, seconds: float) -> None:
        self._asleep.append((time.monotonic() + seconds, pid))

    def close(self) -> None:
        if self._client is not None:
            self._client.__exit__(None, None, None)
            self._client = None


def wait_until_freed(before: set[str], seconds: float = GONE_SECONDS) -> None:
    """Fail when memory is left behind that was not `before`. What a test beside this one leaves for
    a moment goes too."""
    deadline = time.monotonic() + seconds
    while (left := shared_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"shared memory left: {left}"


def shared_memory() -> set[str]:
    """What lies in /dev/shm and belongs to no living process: names there hold their owner's id."""
    names = os.listdir("/dev/shm")
    return {
        name
        for name in names
        if not any(Path(f"/proc/{pid}").exists() for pid in re.findall(r"\d+", name))
    }
