"""Answer heartbeats for all processes of a remote host, from one process there.

    controller --one message a period--> this actor --> the heartbeat actor of every process

The controller keeps this actor (`services.pool.host_heartbeats`), and hears from it when each
process answered last, and which have ended. The messages to the processes stay on their host.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cartridge_forge.actors.heartbeat import Heartbeat, HeartbeatActor, PortCall

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
