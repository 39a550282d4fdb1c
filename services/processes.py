"""Processes for replicas: one process mesh each, warm spares, and an end for the dead.

The only caller of `spawn_procs` beside the client that starts the controller. A process mesh with
a failed actor takes no new ones, so a replica's successor always gets another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from monarch.actor import HostMesh, ProcMesh

from actors.pulse import Beat, PulseActor
from actors.setup import bootstrap
from protocols.errors import RunError
from protocols.service_spec import HealthSpec

SPARE_SECONDS = 1.0  # an idle process answers in a millisecond
STOP_SECONDS = 3.0  # an idle process stops in 0.5 s, one in a computation not before its end
RETRY_SECONDS = 1.0  # between two trials of a host that fails them at once
START_SHARE = 0.25  # of the time for a start, for one host of several
ALONE = 2.0  # times dead_after_s without a question: by then its owner has given it up

T = TypeVar("T")


@dataclass(eq=False)
class Process:
    """One process of the mesh with the actor that answers for it. `pid` is 0 until it did;
    `heard` is when it last answered (monotonic seconds); `given_up` once Monarch reports it lost,
    as it does of one that only stood still for too long."""

    name: str
    host: str
    procs: ProcMesh
    pulse: Any
    local: bool
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
            await asyncio.wait_for(_finish(self.procs.stop()), STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        if self.local and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass(eq=False)
class Host:
    """A machine that processes are started on. `trial` runs while it is doubted, and ends once a
    process has started there again; `gates` are what to resolve when it is doubted."""

    label: str
    mesh: HostMesh
    living: list[Process] = field(default_factory=list)
    gates: set[asyncio.Future[None]] = field(default_factory=set)
    trial: asyncio.Task[None] | None = None


class Processes:
    """Starts processes over one or several hosts, and keeps `spares` warm ones of each number
    of threads.

    `warm` is what a spare does beforehand, in its own process (it is pickled): the imports that
    take a replica seconds. `local` says that all processes are this host's: these can be killed,
    and their ends seen. Of several hosts, one on which a process fell silent or did not start gets
    no others until one that is started there on trial answers.
    """

    def __init__(
        self,
        hosts: Sequence[HostMesh],
        health: HealthSpec,
        *,
        spares: int = 0,
        warm: Callable[[], None] | None = None,
        timeout_s: float = 120.0,
        local: bool = True,
    ) -> None:
        here = socket.gethostname()
        self._hosts = [Host(here if local else f"host{i}", mesh) for i, mesh in enumerate(hosts)]
        self._health = health
        self._local = local
        self._spares: dict[
            asyncio.Task[Process], int
        ] = {}  # to the threads that it was started for
        self._threads: set[int] = set()  # that replicas were started with
        self._wanted_spares = spares
        self._keeping = False
        self._warm = warm
        self._timeout_s = timeout_s
        self._count = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def take(
        self,
        name: str,
        threads: int,
        gpus: Sequence[int] = (),
        away_from: Process | None = None,
    ) -> Process:
        """A process for a replica: a spare, warm or still warming, where no device is asked for,
        or a new one on the host that has the fewest, other than that of `away_from`.
        `name`: lower-case letters and digits."""
        self._threads.add(threads)
        while not gpus and away_from is None and not self._closed:
            # Of as many threads: OpenMP reads their number once, and torch's results depend on it.
            fit = (spare for spare, count in self._spares.items() if count == threads)
            warming = next(fit, None)
            if warming is None:
                break
            del self._spares[warming]
            if self._keeping:
                self.keep_spares()
            try:
                spare = await asyncio.shield(warming)
            except RunError:  # a spare is a convenience: who needs a process starts one itself
                continue
            try:
                await asyncio.wait_for(spare.beat(), SPARE_SECONDS)
            except Exception:  # dead, stopped or out of reach while it waited: the next, or a new
                self._begin(self.discard(spare))
                continue
            return spare
        if self._closed:
            raise RunError("the mesh is stopping: it starts no process")
        crowded = None if away_from is None else self._host_of(away_from)
        _, process = await self._start(name, threads, gpus, crowded)
        return process

    def keep_spares(self) -> None:
        """From now on keep the spares: those that are missing, or taken later, start beside the
        work."""
        self._keeping = True
        for threads in sorted(self._threads or {1}):
            there = list(self._spares.values()).count(threads)
            self.warm([threads] * (self._wanted_spares - there))

    def warm(self, threads: Sequence[int]) -> None:
        """Start a spare for each, of so many threads, beside one another."""
        for count in () if self._closed else threads:
            self._spares[self._begin(self._start_spare(count))] = count

    async def discard(self, process: Process) -> None:
        """Throw a process away, dead or alive; once more does no harm."""
        process.kill()
        await process.end()
        self._forget(process)

    async def stop(self) -> None:
        """Stop every process; a dead or silent one does not keep the others."""
        self._closed = True
        ending = list(self._tasks)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await asyncio.gather(*(p.end() for host in self._hosts for p in host.living))
        for host in self._hosts:
            host.living.clear()

    def lost(self, process: Process) -> None:
        """Its host may be what was lost."""
        host = self._host_of(process)
        if host is not None and not process.gone():
            self._doubt(host)

    def mind(self) -> None:
        """Ask the spares of other hosts for a sign of life, as the service asks its replicas';
        called at every heartbeat."""
        if self._local:
            return
        for task, spare in self._warm_spares().items():
            if spare.silent_s < self._health.dead_after_s:
                self._begin(self._hear(spare))
            else:
                del self._spares[task]
                self.lost(spare)
                self._begin(self.discard(spare))

    def crowded(self) -> Sequence[Process]:
        """The processes at work on a host that has two more than another, which could take one."""
        idle = self._warm_spares().values()
        well = (h for h in self._hosts if h.trial is None)
        at_work = sorted(([p for p in h.living if p not in idle] for h in well), key=len)
        if not at_work or len(at_work[-1]) - len(at_work[0]) < 2:
            return ()
        return at_work[-1]

    def _warm_spares(self) -> dict[asyncio.Task[Process], Process]:
        done = (t for t in self._spares if t.done() and not t.cancelled())
        return {t: t.result() for t in done if t.exception() is None}

    # -- hosts ----------------------------------------------------------------------------------

    async def _start_spare(self, threads: int) -> Process:
        host, process = await self._start("spare", threads, gpus=())
        if self._warm is not None:
            try:
                warming = self._begin(_finish(process.pulse.warm.call_one(self._warm)))
                await self._unless_lost(host, warming, self._timeout_s)
            except Exception as error:
                await self.discard(process)
                raise RunError(f"a spare did not become warm: {error!r}") from error
        return process

    async def _start(
        self, stem: str, threads: int, gpus: Sequence[int], crowded: Host | None = None
    ) -> tuple[Host, Process]:
        """Where one host fails, or turns out to be lost, on another."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            host = await self._choose(deadline, crowded)
            # A name serves once: what Monarch reports of a start given up must not name its heir.
            name = f"{stem}x{next(self._count)}"
            several = len(self._hosts) > 1
            limit = self._timeout_s * (START_SHARE if several else 1)
            try:
                process = self._spawn_on(host, name, threads, gpus)
                start = self._begin(self._started(process, self._timeout_s))
                return host, await self._unless_lost(host, start, limit, self._end_late)
            except RunError:
                if not several or time.monotonic() > deadline:
                    raise
                self._doubt(host)

    def _spawn_on(self, host: Host, name: str, threads: int, gpus: Sequence[int]) -> Process:
        """A process that is being started. It counts at once, for whoever chooses next."""
        try:
            procs = host.mesh.spawn_procs(
                per_host={"procs": 1}, name=name, bootstrap=bootstrap(threads, gpus)
            )
            alone_s = None if self._local else ALONE * self._health.dead_after_s
            pulse = procs.spawn(f"{name}pulse", PulseActor, alone_s)
        except Exception as error:
            raise RunError(f"{host.label} started no process {name}: {error!r}") from error
        process = Process(name, host.label, procs, pulse, self._local)
        host.living.append(process)
        return process

    async def _started(self, process: Process, limit: float | None) -> Process:
        """The process, once it has answered."""
        try:
            await asyncio.wait_for(process.beat(), limit)
        except Exception as error:
            self._forget(process)
            await process.end()
            raise RunError(
                f"{process.host} started no process {process.name}: {error!r}"
            ) from error
        return process

    async def _choose(self, deadline: float, crowded: Host | None) -> Host:
        """The host with the fewest processes that is not doubted, waited for until `deadline`."""
        while True:
            well = [h for h in self._hosts if h.trial is None and h is not crowded]
            if well:
                return min(well, key=lambda h: len(h.living))
            trials = {h.trial for h in self._hosts if h.trial is not None}
            back: set[asyncio.Task[None]] = set()
            if trials:
                left = max(0.0, deadline - time.monotonic())
                back, _ = await asyncio.wait(
                    trials, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
            if not back:
                raise RunError(
                    f"no host started a process within {self._timeout_s:g} s; check the workers "
                    "and the network between them and here"
                )

    def _doubt(self, host: Host) -> None:
        if len(self._hosts) == 1 or host.trial is not None or self._closed:
            return
        host.trial = self._begin(self._try(host))
        for gate in host.gates:
            if not gate.done():
                gate.set_result(None)

    async def _try(self, host: Host) -> None:
        """Return once a process starts there. One start waits for the link as long as Monarch
        lets it: every one that was given up could still come up when the link returns."""
        while True:
            try:
                name = f"trialx{next(self._count)}"
                process = await self._started(self._spawn_on(host, name, 1, ()), None)
            except RunError:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            host.trial = None
            self._begin(self.discard(process))
            return

    async def _unless_lost(
        self,
        host: Host,
        work: asyncio.Task[T],
        limit: float,
        late: Callable[[asyncio.Task[T]], Coroutine[Any, Any, None]] | None = None,
    ) -> T:
        """What `work` returns. RunError when its host is doubted or after `limit` seconds: it goes
        on alone then, and `late` sees to it."""
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        host.gates.add(gate)
        try:
            either: set[asyncio.Future[Any]] = {work, gate}
            await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            host.gates.remove(gate)
        if not work.done():
            if late is not None:
                self._begin(late(work))
            raise RunError(f"{host.label} does not answer")
        return work.result()

    async def _end_late(self, start: asyncio.Task[Process]) -> None:
        """End a process that comes up when nobody waits for it any more."""
        with contextlib.suppress(RunError):
            await self.discard(await start)

    async def _hear(self, process: Process) -> None:
        with contextlib.suppress(Exception):  # its silence is judged by the clock
            await asyncio.wait_for(process.beat(), self._health.dead_after_s)

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run it beside everything else; cancelled by `stop`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: who gave it up does not ask

    def _host_of(self, process: Process) -> Host | None:
        return next((h for h in self._hosts if process in h.living), None)

    def _forget(self, process: Process) -> None:
        host = self._host_of(process)
        if host is not None:
            host.living.remove(process)


def has_ended(pid: int) -> bool:
    """Whether a process of this host is gone, or dead and not yet reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


async def _finish(future: Any) -> Any:
    """A Monarch future as a coroutine, which asyncio can bound."""
    return await future
