"""One process of the mesh with the actor that answers for it, and a host that has such."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any, TypeVar

from monarch.actor import HostMesh, ProcMesh

from actors.pulse import Beat
from protocols.errors import RunError
from services.hosts import Worker
from services.placement import Spot
from services.system import has_ended

STOP_SECONDS = 3.0  # an idle process stops in 0.5 s, one in a computation not before its end

T = TypeVar("T")


@dataclass(eq=False)
class Process:
    """`pid` is 0 until it answered; `heard` is when it last did (monotonic seconds); `given_up`
    once Monarch reports it lost, as it does of one that only stood still for too long. `gpus` are
    the devices of its host that it sees; `taken` once a replica lives in it."""

    name: str
    host: str
    procs: ProcMesh
    pulse: Any
    local: bool
    gpus: tuple[int, ...] = ()
    taken: bool = False
    pid: int = 0
    given_up: bool = False
    heard: float = field(default_factory=time.monotonic)

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.heard

    async def beat(self) -> Beat:
        beat: Beat = await self.pulse.beat.call_one()
        self.pid, self.heard = beat.pid, time.monotonic()
        return beat

    def gone(self) -> bool:
        """Whether it has surely ended: known of processes of this host alone."""
        return self.local and self.pid > 0 and has_ended(self.pid)

    async def end(self) -> None:
        """Stop it, and kill it where it does not: a stopped (SIGSTOP) process answers nobody."""
        with contextlib.suppress(Exception):  # being thrown away: how does not matter
            await asyncio.wait_for(finish(self.procs.stop()), STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        if self.local and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass(eq=False)
class Host:
    """A machine that processes are started on. `trial` runs while it is doubted, and ends once a
    process has started there again; `gates` are what to resolve when it is doubted or left.
    Processes of a `local` one can be killed, and their ends seen."""

    worker: Worker
    mesh: HostMesh
    local: bool
    living: list[Process] = field(default_factory=list)
    gates: set[asyncio.Future[None]] = field(default_factory=set)
    trial: asyncio.Task[None] | None = None

    @property
    def label(self) -> str:
        return self.worker.name

    @property
    def spot(self) -> Spot:
        role, capacity = self.worker.role, self.worker.capacity
        return Spot(role, capacity, len(self.living), self.trial is None)

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


async def finish(future: Any) -> Any:
    """A Monarch future as a coroutine, which asyncio can bound."""
    return await future
