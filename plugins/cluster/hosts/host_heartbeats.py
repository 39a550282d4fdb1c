"""Send a remote host one heartbeat message a period, however many processes run there.

A process of the host asks all others (`HostBeatsActor`): its `speaker`. Its reply tells of each
when it answered last, so that silence is judged as if each had been asked from here.

    no speaker                          each process is asked from here; with two or more one starts
    the speaker replies                 it alone is asked
    it does not reply in time           each is asked from here as well, until it does
    its call fails, or it stays silent  it is ended, and another starts
    a process that it does not know     is described in the next message; nothing is concluded

So no process is lost with the speaker: without it heartbeats are those of single processes.

The speaker answers for all processes of its host:

    controller --one message a period--> this actor --> the heartbeat actor of every process

The controller keeps this actor, and hears from it when each process answered last, and which have
ended. The messages to the processes stay on their host.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import select
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cartridge_forge.actors.heartbeat import Heartbeat, HeartbeatActor, PortCall
from cartridge_forge.protocols.spec.services import HealthSpec
from cartridge_forge.services.pool.process import ALONE, ProcessHost, ReplicaProcess

WAIT_SHARE = 0.25  # of a period, for answers; later ones are in the next reply
PATIENCE_PERIODS = 10.0  # after which an answer is no longer waited for


@dataclass(frozen=True)
class WatchedProcess:
    """Hold the calls of the heartbeat actor, and the process id, of each rank of a process."""

    beats: tuple[PortCall, ...]
    pids: tuple[int, ...]


@dataclass(frozen=True)
class ProcessBeat:
    """Tell of a process: the last heartbeats of its ranks, `age_s` seconds ago, and the id of the
    rank's process that has ended, 0 for none. `beats` is empty until all ranks have answered."""

    beats: tuple[Heartbeat, ...] = ()
    age_s: float = 0.0
    ended: int = 0


class ProcessWatch:
    """Ask a process of this host for heartbeats, and see its end. `close` ends both."""

    def __init__(self, process: WatchedProcess) -> None:
        self._calls = process.beats
        self._beats: tuple[Heartbeat, ...] = ()
        self._answered = 0.0
        self._ended = 0
        self._asking: set[asyncio.Task[None]] = set()
        self._poll = select.poll()
        self._pids: dict[int, int] = {}  # by descriptor
        for pid in process.pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:  # it has ended, and its parent has waited for it
                self._ended = pid
                continue
            self._pids[descriptor] = pid
            self._poll.register(descriptor, select.POLLIN)

    def ask(self, patience_s: float) -> asyncio.Task[None] | None:
        """Begin to ask all ranks; return None for a process that has ended."""
        for descriptor, _ in () if self._ended else self._poll.poll(0):
            self._ended = self._pids[descriptor]
        if self._ended:
            return None
        task = asyncio.create_task(self._ask(patience_s))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return task

    async def _ask(self, patience_s: float) -> None:
        with contextlib.suppress(Exception):  # the age of the last answer tells of silence
            async with asyncio.timeout(patience_s):
                beats = await asyncio.gather(*(call.call_one() for call in self._calls))
            self._beats, self._answered = tuple(beats), time.monotonic()

    def told(self) -> ProcessBeat:
        """Return what is known of the process now."""
        age_s = time.monotonic() - self._answered if self._beats else 0.0
        return ProcessBeat(self._beats, age_s, self._ended)

    def close(self) -> None:
        for task in self._asking:
            task.cancel()
        for descriptor in self._pids:
            os.close(descriptor)


class HostBeats:
    """Watch the processes of this host that its controller names in each message."""

    def __init__(self) -> None:
        self._watches: dict[str, ProcessWatch] = {}

    async def ask(
        self, names: Sequence[str], added: Mapping[str, WatchedProcess], period_s: float
    ) -> dict[str, ProcessBeat]:
        """Watch exactly the processes `names`, ask them, and return what is known of each.

        `added` describes those that are not watched yet; a name without description is left out.
        Answers are waited for during a share of the period, so that one silent process does not
        delay the news of the others.
        """
        for name in self._watches.keys() - set(names):
            self._watches.pop(name).close()
        for name, process in added.items():
            if name not in self._watches:
                self._watches[name] = ProcessWatch(process)
        started = [watch.ask(PATIENCE_PERIODS * period_s) for watch in self._watches.values()]
        asking = [task for task in started if task is not None]
        if asking:
            await asyncio.wait(asking, timeout=WAIT_SHARE * period_s)
        return {name: watch.told() for name, watch in self._watches.items()}


class HostBeatsActor(HeartbeatActor):
    """Ask the processes of its host. It has a process of its own, so that it does not end with any
    replica; where it has ended it is started again."""

    def __init__(self, alone_s: float | None = None) -> None:
        super().__init__(alone_s)
        self._host = HostBeats()

    async def beat_host(
        self, names: Sequence[str], added: Mapping[str, WatchedProcess], period_s: float
    ) -> dict[str, ProcessBeat]:
        """See `HostBeats.ask`."""
        self._asked = time.monotonic()
        return await self._host.ask(names, added, period_s)


FRESH_PERIODS = 2.0  # since an answer of the host, within which a speaker is started there
RETRY_SECONDS = 5.0  # after a speaker that failed
_count = itertools.count()


@dataclass(frozen=True)
class HostAsk:
    """Hold whom the heartbeats of one period go to: the speaker, with the names of all processes
    and those that it does not know yet, and the processes that are asked from here."""

    speaker: ReplicaProcess | None = None
    names: tuple[str, ...] = ()
    added: tuple[ReplicaProcess, ...] = ()
    single: tuple[ReplicaProcess, ...] = ()


class HeartbeatPlan:
    """Decide whom the heartbeats of one host go to, and read what its speaker replies. Times are
    monotonic seconds."""

    def __init__(self, health: HealthSpec) -> None:
        self.speaker: ReplicaProcess | None = None
        self._known: frozenset[str] = frozenset()  # to the speaker
        self._asked_at: float | None = None  # the first time since its last reply
        self._period_s = health.heartbeat_s
        # Half of what is left of the time to suspicion: the processes are then asked in time.
        self._patience_s = (health.suspect_after_s - health.heartbeat_s) / 2

    def use(self, speaker: ReplicaProcess | None) -> None:
        """Ask through this process from now on; None: each process from here."""
        self.speaker, self._known, self._asked_at = speaker, frozenset(), None

    def wants_speaker(self, watched: Sequence[ReplicaProcess], now: float) -> bool:
        """Return whether one is to be started: for several processes, on a host that answers."""
        limit_s = FRESH_PERIODS * self._period_s
        fresh = any(now - process.last_beat < limit_s for process in watched)
        return self.speaker is None and len(watched) > 1 and fresh

    def ask(self, watched: Sequence[ReplicaProcess], now: float) -> HostAsk:
        """Return whom to ask for news of the `watched` processes."""
        if self.speaker is None:
            return HostAsk(single=tuple(watched))
        late = self._asked_at is not None and now - self._asked_at >= self._patience_s
        if self._asked_at is None:
            self._asked_at = now
        names = tuple(process.name for process in watched)
        added = tuple(process for process in watched if process.name not in self._known)
        return HostAsk(self.speaker, names, added, tuple(watched) if late else ())

    def heard(
        self,
        speaker: ReplicaProcess,
        reply: Mapping[str, ProcessBeat],
        watched: Sequence[ReplicaProcess],
        now: float,
    ) -> None:
        """Tell the `watched` processes what a reply that came at `now` says of them."""
        if speaker is self.speaker:
            self._asked_at, self._known = None, frozenset(reply)
        for process in watched:
            beat = reply.get(process.name, ProcessBeat())
            if beat.ended:
                process.has_gone(beat.ended)
            elif beat.beats:
                process.hear(beat.beats, now - beat.age_s)


class HostHeartbeats:
    """Keep the speaker of a remote host, and send the heartbeats."""

    def __init__(self, host: ProcessHost, health: HealthSpec, start_timeout_s: float) -> None:
        self._host, self._health, self._start_timeout_s = host, health, start_timeout_s
        self._plan = HeartbeatPlan(health)
        self._process: ReplicaProcess | None = None  # the speaker, also while it starts
        self._failed_at = -math.inf

    def send(self, watched: Sequence[ReplicaProcess]) -> list[Coroutine[Any, Any, None]]:
        """Return the work of this period, each of one message, and the start of a speaker."""
        now = time.monotonic()
        ask = self._plan.ask(watched, now)
        works = [self._ask_one(process) for process in ask.single]
        if ask.speaker is not None:
            works.append(self._ask_host(ask.speaker, ask, watched))
        may_start = self._host.well and now - self._failed_at >= RETRY_SECONDS
        if self._process is None and may_start and self._plan.wants_speaker(watched, now):
            works.append(self._start())
        return works

    async def stop(self) -> None:
        """End the speaker."""
        process, self._process = self._process, None
        self._plan.use(None)
        if process is not None:
            await process.end()

    async def _start(self) -> None:
        alone_s = ALONE * self._health.dead_after_s
        name = f"hostbeatsx{next(_count)}"
        try:
            process = self._host.spawn_beside(name, 1, (), 1, alone_s, (), HostBeatsActor)
            self._process = process
            async with asyncio.timeout(self._start_timeout_s):
                await process.beat()
        except Exception:  # each process is asked from here meanwhile
            await self._fail()
            return
        if self._process is process:  # not stopped meanwhile
            self._plan.use(process)

    async def _fail(self) -> None:
        self._failed_at = time.monotonic()
        await self.stop()

    async def _ask_host(
        self, speaker: ReplicaProcess, ask: HostAsk, watched: Sequence[ReplicaProcess]
    ) -> None:
        added = {
            p.name: WatchedProcess(tuple(h.beat for h in p.heartbeats), p.pids) for p in ask.added
        }
        try:
            async with asyncio.timeout(self._health.dead_after_s):
                reply = await speaker.heartbeat.beat_host.choose(
                    ask.names, added, self._health.heartbeat_s
                )
        except Exception:  # no reply in time, or what it raised
            if speaker is self._process:
                await self._fail()
            return
        self._plan.heard(speaker, reply, watched, time.monotonic())

    async def _ask_one(self, process: ReplicaProcess) -> None:
        with contextlib.suppress(Exception):  # its owner judges its silence
            await asyncio.wait_for(process.beat(), self._health.dead_after_s)
