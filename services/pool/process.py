"""What a replica lives in: a process, or several ranks, each with an actor that answers for it.
And a host that has such."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from monarch.actor import HostMesh, ProcMesh

from actors.heartbeat import Heartbeat
from protocols.errors import RunError
from services.hosts.source import HostWorker
from services.pool.placement import Slot
from services.proc_info import has_ended

STOP_SECONDS = 3.0  # an idle process stops in 0.5 s, one in a computation not before its end

T = TypeVar("T")


@dataclass(eq=False)
class ReplicaProcess:
    """One, or `ranks` of one host that live and end together: it is heard when all of them were,
    and gone with any. `pids` are theirs, none until all answered; `heard` is when they last did
    (monotonic seconds); `given_up` once Monarch reports it lost, as it does of one that only stood
    still for too long. `gpus` are the devices of its host that they see; `taken` once a replica
    lives in it."""

    name: str
    host: str
    procs: ProcMesh
    pulses: Sequence[Any]
    local: bool
    gpus: tuple[int, ...] = ()
    taken: bool = False
    pids: tuple[int, ...] = ()
    given_up: bool = False
    heard: float = field(default_factory=time.monotonic)

    @property
    def pulse(self) -> Any:
        """The pulse of the only one, or of rank 0."""
        return self.pulses[0]

    @property
    def pid(self) -> int:
        """That of the only one, or of rank 0; 0 until it answered."""
        return self.pids[0] if self.pids else 0

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.heard

    async def beat(self) -> int:
        """Resident memory in bytes, of all of them."""
        beats: list[Heartbeat] = await asyncio.gather(
            *(finish(p.beat.call_one()) for p in self.pulses)
        )
        self.pids, self.heard = tuple(beat.pid for beat in beats), time.monotonic()
        return sum(beat.memory_bytes for beat in beats)

    def gone(self) -> int:
        """The id of one that has surely ended, 0 for none: known of this host's alone."""
        return next((pid for pid in self.pids if has_ended(pid)), 0) if self.local else 0

    async def end(self) -> None:
        """Stop it, and kill it where it does not: a stopped (SIGSTOP) process answers nobody."""
        with contextlib.suppress(Exception):  # being thrown away: how does not matter
            await asyncio.wait_for(finish(self.procs.stop()), STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        for pid in self.pids if self.local else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclass(eq=False)
class ProcessHost:
    """A machine that processes are started on. `trial` runs while it is doubted, and ends once a
    process has started there again; `gates` are what to resolve when it is doubted or left.
    Processes of a `local` one can be killed, and their ends seen."""

    worker: HostWorker
    mesh: HostMesh
    local: bool
    living: list[ReplicaProcess] = field(default_factory=list)
    gates: set[asyncio.Future[None]] = field(default_factory=set)
    trial: asyncio.Task[None] | None = None

    @property
    def label(self) -> str:
        return self.worker.name

    @property
    def spot(self) -> Slot:
        role, capacity = self.worker.role, self.worker.capacity
        return Slot(role, capacity, len(self.living), self.trial is None)

    def open_gates(self) -> None:
        """Whoever waits for something there gives it up."""
        for gate in self.gates:
            if not gate.done():
                gate.set_result(None)

    async def unless_lost(self, work: asyncio.Task[T], limit: float) -> T:
        """What `work` returns. RunError when the host is doubted or left, or after `limit` seconds:
        `work` goes on alone then."""
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gates.add(gate)
        try:
            either: set[asyncio.Future[Any]] = {work, gate}
            await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.gates.remove(gate)
        if not work.done():
            raise RunError(f"{self.label} does not answer")
        return work.result()


def by_rank(actors: Any, ranks: int) -> list[Any]:
    """An actor mesh as one handle for each rank."""
    return [actors] if ranks == 1 else [actors.slice(procs=rank) for rank in range(ranks)]


async def finish(future: Any) -> Any:
    """A Monarch future as a coroutine, which asyncio can bound."""
    return await future
