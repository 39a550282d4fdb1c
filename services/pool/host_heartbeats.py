"""Send a remote host one heartbeat message a period, however many processes run there.

One process of the host, its `speaker`, asks all of them (`actors.host_beats`). Its reply tells of
each when it answered last, so silence is judged as if each had been asked from here.

    fewer than two processes                     each is asked from here
    no speaker                                   the first that has just answered becomes it
    the speaker does not answer                  all are asked from here, and another is chosen
    a process that the speaker does not know     nothing is concluded; it is described in the next

So nothing depends on the speaker: without it heartbeats are those of single processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.host_beats import ProcessBeat, WatchedProcess
from protocols.spec.services import HealthSpec
from services.hosts.source import finish
from services.pool.process import ReplicaProcess

FRESH_PERIODS = 2.0  # a speaker has answered within so many


@dataclass(frozen=True)
class HostAsk:
    """Hold whom a host's heartbeats of one period go to: the speaker, with all names and the
    processes that it does not know yet, and those that are asked one by one."""

    speaker: ReplicaProcess | None = None
    names: tuple[str, ...] = ()
    added: tuple[ReplicaProcess, ...] = ()
    single: tuple[ReplicaProcess, ...] = ()


class HostHeartbeats:
    """Decide whom the heartbeats of one remote host go to, and read what its speaker replies."""

    def __init__(self, health: HealthSpec) -> None:
        self._health = health
        self._speaker: ReplicaProcess | None = None
        self._known: frozenset[str] = frozenset()  # to the speaker
        self._asked_at: float | None = None  # the first time since its last reply
        # Half of what is left of the time to suspicion: the others are then asked in time.
        self._patience_s = (health.suspect_after_s - health.heartbeat_s) / 2

    def plan(self, watched: Sequence[ReplicaProcess], now: float) -> HostAsk:
        """Return whom to ask at `now`, in monotonic seconds. Earlier ones are preferred as
        speaker."""
        if self._asked_at is not None and now - self._asked_at >= self._patience_s:
            self._choose(None)
            return HostAsk(single=tuple(watched))
        if len(watched) < 2:
            self._choose(None)
        elif self._speaker not in watched:
            limit_s = FRESH_PERIODS * self._health.heartbeat_s
            self._choose(next((p for p in watched if now - p.last_beat < limit_s), None))
        if self._speaker is None:
            return HostAsk(single=tuple(watched))
        if self._asked_at is None:
            self._asked_at = now
        names = tuple(process.name for process in watched)
        added = tuple(process for process in watched if process.name not in self._known)
        return HostAsk(self._speaker, names, added)

    def heard(
        self, ask: HostAsk, reply: Mapping[str, ProcessBeat], watched: Sequence[ReplicaProcess],
        now: float,
    ) -> None:  # fmt: skip
        """Tell the processes that are still watched what a reply that came at `now` says."""
        if ask.speaker is self._speaker:
            self._asked_at, self._known = None, frozenset(reply)
        for process in watched:
            told = reply.get(process.name, ProcessBeat())
            if told.ended:
                process.has_gone(told.ended)
            elif told.beats:
                process.hear(told.beats, now - told.age_s)

    def failed(self, ask: HostAsk) -> None:
        """Ask all processes one by one in the next period, after a call of the speaker failed."""
        if ask.speaker is self._speaker:
            self._asked_at = float("-inf")

    def _choose(self, speaker: ReplicaProcess | None) -> None:
        self._speaker, self._known, self._asked_at = speaker, frozenset(), None

    # -- messages -------------------------------------------------------------------------------

    def send(self, watched: Sequence[ReplicaProcess]) -> list[Coroutine[Any, Any, None]]:
        """Return the work of this period: one message, or one for each process."""
        ask = self.plan(watched, time.monotonic())
        if ask.speaker is None:
            return [self._ask_one(process) for process in ask.single]
        return [self._ask_host(ask.speaker, ask, watched)]

    async def _ask_host(
        self, speaker: ReplicaProcess, ask: HostAsk, watched: Sequence[ReplicaProcess]
    ) -> None:
        added = {p.name: WatchedProcess(tuple(p.heartbeats), p.pids) for p in ask.added}
        message = speaker.heartbeat.beat_host.call_one(ask.names, added, self._health.heartbeat_s)
        try:
            reply = await asyncio.wait_for(finish(message), self._health.dead_after_s)
        except Exception:  # Monarch's own, or no reply in time
            self.failed(ask)
            return
        self.heard(ask, reply, watched, time.monotonic())

    async def _ask_one(self, process: ReplicaProcess) -> None:
        with contextlib.suppress(Exception):  # its owner judges its silence
            await asyncio.wait_for(process.beat(), self._health.dead_after_s)
