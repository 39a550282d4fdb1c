"""Send a remote host one heartbeat message a period, however many processes run there.

A process of the host asks all others (`actors.host_beats`): its `speaker`. Its reply tells of each
when it answered last, so that silence is judged as if each had been asked from here.

    no speaker                          each process is asked from here; with two or more one starts
    the speaker replies                 it alone is asked
    it does not reply in time           each is asked from here as well, until it does
    its call fails, or it stays silent  it is ended, and another starts
    a process that it does not know     is described in the next message; nothing is concluded

So no process is lost with the speaker: without it heartbeats are those of single processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cartridge_forge.plugins.cluster.hosts.host_beats import (
    HostBeatsActor,
    ProcessBeat,
    WatchedProcess,
)
from cartridge_forge.protocols.spec.services import HealthSpec
from cartridge_forge.services.pool.process import ALONE, ProcessHost, ReplicaProcess

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
                reply = await speaker.heartbeat.beat_host.call_one(
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
