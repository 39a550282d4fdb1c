"""Start, keep warm and end the processes of replicas: one process mesh of one or several ranks
each.

A process mesh with a failed actor accepts no new actors, so a replica's successor gets a new one.
`services.pool.process` chooses the host; hosts `join` and `leave` at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from monarch.actor import HostMesh

from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.plugins import resolve
from cartridge_forge.protocols.spec.services import HealthSpec
from cartridge_forge.services.awake_clock import loop_time
from cartridge_forge.services.pool.hosts import HostWorker, finish
from cartridge_forge.services.pool.process import (
    ALONE,
    ProcessHost,
    ReplicaProcess,
    choose,
    crowded,
    lack,
    never_fits,
)

SPARE_SECONDS = 1.0  # an idle process answers in a millisecond
RETRY_SECONDS = 1.0  # between two trials of a host that fails them at once
START_SHARE = 0.25  # of the time for a start, for one host of several
# Numbers the processes of every mesh of this process: Monarch's report about one that has ended,
# by a mesh that has stopped too, must not match a later one.
NUMBERS = itertools.count()
RAISE = "raise spawn_timeout_s in the mesh file if it needs longer"

T = TypeVar("T")


class Heartbeats(Protocol):
    """Send the heartbeats of a remote host's processes
    (`plugins.cluster.hosts.host_heartbeats`)."""

    def send(self, watched: Sequence[ReplicaProcess]) -> list[Coroutine[Any, Any, None]]:
        """Return the work of this period."""
        ...

    async def stop(self) -> None:
        """End what asks for the others."""
        ...


class ProcessManager:
    """Start processes on the hosts that joined, and keep `spares` warm ones per number of threads.

    `warm` is pickled and runs in a spare's process beforehand: the imports that take a replica
    seconds. When several hosts take a role, a host on which a process was silent or did not start
    gets no more of them until a trial process answers there.
    """

    def __init__(
        self,
        health: HealthSpec,
        *,
        spares: int = 0,
        warm: Callable[[], None] | None = None,
        timeout_s: float = 120.0,
        variables: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`variables` are the environment variables that the processes of a role keep, besides
        ordinary ones; "" for spares, which only a role with the same variables takes."""
        self._hosts: list[ProcessHost] = []
        self._left: list[ProcessHost] = []  # hosts being left: no process starts there
        self._health = health
        self._heartbeats: dict[ProcessHost, Heartbeats] = {}  # of remote hosts
        self._spares: dict[asyncio.Task[ReplicaProcess], int] = {}  # to its number of threads
        self._threads: set[int] = set()  # thread counts of replicas so far
        self._wanted_spares = spares
        self._keeping = False
        self._warm = warm
        self._timeout_s = timeout_s
        self._variables = variables or {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()
        self._closed = False

    async def take(
        self,
        name: str,
        threads: int,
        gpus: Sequence[int] = (),
        away_from: ReplicaProcess | None = None,
        role: str = "any",
        ranks: int = 1,
    ) -> ReplicaProcess:
        """Return a process of one or several `ranks` for a replica: a spare, warm or still warming,
        for one process without a GPU and with a spare's variables, where no worker belongs to the
        role alone. Otherwise start one
        on a host that takes the role, not that of `away_from`, waiting for one as long as for a
        start. Raises RunError at the timeout.

        `name`: lower-case letters and digits. `gpus`: devices of all ranks by number on this host;
        on a remote host, as many free ones.
        """
        if ranks == 1:
            self._threads.add(threads)
        needs_own = self.variables(role) != self.variables("") or any(
            host.worker.role == role for host in self._hosts
        )
        while not (gpus or needs_own or self._closed or ranks > 1) and away_from is None:
            # With equal threads: OpenMP reads their number once, and torch's results depend on it.
            fit = (spare for spare, count in self._spares.items() if count == threads)
            warming = next(fit, None)
            if warming is None:
                break
            del self._spares[warming]
            if self._keeping:
                self.keep_spares()
            try:
                spare = await asyncio.shield(warming)
            except RunError:  # the spare failed: try the next, or start a process
                continue
            with contextlib.suppress(Exception):  # dead, paused or unreachable
                await asyncio.wait_for(spare.beat(), SPARE_SECONDS)
                if self._host_of(spare) not in self._left:
                    spare.taken = True
                    return spare
            self._begin(self.discard(spare))
        if self._closed:
            raise RunError("the mesh is stopping: it starts no process")
        without = None if away_from is None else self._host_of(away_from)
        _, process = await self._start(name, role, threads, gpus, without, ranks)
        process.taken = True
        return process

    def variables(self, role: str) -> tuple[str, ...]:
        """Return the environment variables of a role's processes, besides ordinary ones."""
        return tuple(sorted(self._variables.get(role, ())))

    def keep_spares(self) -> None:
        """Keep the wanted number of spares from now on; missing ones start in the background."""
        self._keeping = True
        for threads in sorted(self._threads or {1}):
            count = list(self._spares.values()).count(threads)
            self.warm([threads] * (self._wanted_spares - count))

    def warm(self, threads: Sequence[int]) -> None:
        """Start a spare with so many threads for each entry; none if every worker has one role."""
        if self._closed or not any(host.fits("") for host in self._hosts):
            return
        for count in threads:
            self._spares[self._begin(self._start_spare(count))] = count

    async def discard(self, process: ReplicaProcess) -> None:
        """End a process, dead or alive, and forget it. A second call has no effect."""
        process.kill()
        await process.end()
        self._forget(process)

    async def stop(self) -> None:
        """Stop every process. A dead or silent one does not delay the others."""
        self._closed = True
        ending = list(self._tasks)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        hosts = [*self._hosts, *self._left]
        ends = [p.end() for host in hosts for p in host.processes]
        ends += [heartbeats.stop() for heartbeats in self._heartbeats.values()]
        await asyncio.gather(*ends)
        for host in hosts:
            host.processes.clear()

    def lost(self, process: ReplicaProcess) -> None:
        """Mark the host of a lost process as suspect, unless the process is known to have ended."""
        host = self._host_of(process)
        if host is not None and not process.ended_pid():
            self._suspect(host)

    def mind(self) -> None:
        """Send heartbeats to remote hosts, at every heartbeat of the service, and give up spares
        that are silent there. The owners of other processes judge these (`silent_s`)."""
        for task, spare in self._warm_spares().items():
            silent = spare.silent_s >= self._health.dead_after_s
            if not spare.local and (silent or spare.ended_pid()):
                del self._spares[task]
                self.lost(spare)
                self._begin(self.discard(spare))
        spares = self._warm_spares().values()
        for host, heartbeats in self._heartbeats.items():
            working = [p for p in host.processes if p.taken or p in spares]
            watched = [p for p in (*host.beside, *working) if not p.ending]
            for work in heartbeats.send(watched):
                self._begin(work)

    # -- hosts that come and go -----------------------------------------------------------------

    def join(self, worker: HostWorker, mesh: HostMesh, *, local: bool = False) -> ProcessHost:
        """Add a host on which processes start from now on, and return it."""
        host = ProcessHost(worker, mesh, local)
        self._hosts.append(host)
        if not local:
            heartbeats = resolve("hooks", "host_heartbeats")
            self._heartbeats[host] = heartbeats(host, self._health, self._timeout_s)
        self._change()
        if self._keeping:
            self.keep_spares()
        return host

    def arrange(self, workers: Sequence[str]) -> None:
        """Order the hosts by their workers' names as given; the last are given up first."""
        order = {name: i for i, name in enumerate(workers)}
        self._hosts.sort(key=lambda host: order.get(host.label, -1))

    def leave(self, host: ProcessHost) -> None:
        """Start nothing on a host any more, and end its spares and starting processes. The owner of
        replicas there moves them (`leaving`)."""
        if host not in self._hosts:
            return
        self._hosts.remove(host)
        self._left.append(host)
        if host.trial is not None:
            host.trial.cancel()
        host.open_gates()
        local_spares = {task: p for task, p in self._warm_spares().items() if p in host.processes}
        for task in local_spares:
            del self._spares[task]
        for process in host.processes:
            if not process.taken:
                self._begin(self.discard(process))
        if self._keeping:
            self.keep_spares()
        self._change()

    async def left(self, host: ProcessHost) -> None:
        """Wait until the host has no process, and forget the host."""
        while host.processes:
            await self._changed.wait()
        self._left.remove(host)
        if host in self._heartbeats:
            self._begin(self._heartbeats.pop(host).stop())

    def leaving(self) -> Sequence[ReplicaProcess]:
        """Return the processes at work on hosts that are being left."""
        return [p for host in self._left for p in host.processes if p.taken]

    @property
    def remote_hosts(self) -> Sequence[ProcessHost]:
        """Return the hosts besides this one, without those that are being left."""
        return [host for host in self._hosts if not host.local]

    def rank(self, process: ReplicaProcess) -> int:
        """Return the index of a process's host; 0 where its worker takes any role."""
        host = self._host_of(process)
        return self._hosts.index(host) if host in self._hosts and host.worker.role else 0

    def lack(self, role: str, gpus: int = 0) -> str:
        """Return a message why a process of the role with so many GPUs does not start."""
        return lack(self._hosts, role, gpus)

    def crowded(self) -> Sequence[ReplicaProcess]:
        """Return the working processes of a host with two more than another of its role with
        room."""
        idle = self._warm_spares().values()
        working = [[p for p in host.processes if p not in idle] for host in self._hosts]
        most = crowded(self._hosts, [len(replicas) for replicas in working])
        return () if most is None else working[most]

    def _warm_spares(self) -> dict[asyncio.Task[ReplicaProcess], ReplicaProcess]:
        finished = (t for t in self._spares if t.done() and not t.cancelled())
        return {t: t.result() for t in finished if t.exception() is None}

    # -- starts ---------------------------------------------------------------------------------

    async def _start_spare(self, threads: int) -> ReplicaProcess:
        host, process = await self._start("spare", "", threads, gpus=())
        if self._warm is not None:
            try:
                warming = self._begin(finish(process.heartbeat.warm.call_one(self._warm)))
                await host.unless_lost(warming, self._timeout_s)
            except Exception as error:
                await self.discard(process)
                raise RunError(f"a spare did not become warm: {error!r}") from error
        return process

    async def _start(
        self,
        stem: str,
        role: str,
        threads: int,
        gpus: Sequence[int],
        without: ProcessHost | None = None,
        ranks: int = 1,
    ) -> tuple[ProcessHost, ReplicaProcess]:
        """Start a process; when one host fails or is lost, on another."""
        deadline = loop_time() + self._timeout_s
        while True:
            host = await self._choose(role, deadline, without, len(gpus))
            name = f"{stem}x{next(NUMBERS)}"
            limit = self._timeout_s * (START_SHARE if self._is_one_of_several(host) else 1)
            try:
                process = self._spawn_on(host, name, role, threads, gpus, ranks)
                start = self._begin(self._started(process, self._timeout_s))
                try:
                    return host, await host.unless_lost(start, limit)
                finally:
                    if not start.done() and not self._closed:
                        self._begin(self._end_late(start))
            except RunError:
                if host in self._left:
                    continue
                if not self._is_one_of_several(host) or loop_time() > deadline:
                    raise
                self._suspect(host)

    def _spawn_on(
        self,
        host: ProcessHost,
        name: str,
        role: str,
        threads: int,
        gpus: Sequence[int],
        ranks: int = 1,
    ) -> ReplicaProcess:
        alone_s = None if host.local else ALONE * self._health.dead_after_s
        return host.spawn(name, threads, gpus, ranks, alone_s, self.variables(role))

    async def _started(self, process: ReplicaProcess, limit: float | None) -> ReplicaProcess:
        """Return the process once it has answered."""
        try:
            await asyncio.wait_for(process.beat(), limit)
        except Exception as error:
            self._forget(process)
            await process.end()
            why = repr(error)
            if isinstance(error, TimeoutError):
                why = f"it did not answer within {limit:g} s; {RAISE}"
            raise RunError(f"{process.host} started no process {process.name}: {why}") from error
        return process

    async def _choose(
        self, role: str, deadline: float, without: ProcessHost | None, gpus: int
    ) -> ProcessHost:
        """Return the host for a process of the role, waiting for one until `deadline`; not where
        every worker has fewer GPUs than one process asks for."""
        while True:
            chosen = choose(self._hosts, role, without, gpus)
            if chosen is not None:
                return chosen
            if not role and not any(host.fits(role) for host in self._hosts):
                raise RunError("no worker takes spares")
            if never_fits(self._hosts, role, gpus):
                raise RunError(
                    f"{self.lack(role, gpus)}; lower roles.{role}.gpus, or start workers on hosts "
                    "with more GPUs"
                )
            try:
                async with asyncio.timeout(max(0.0, deadline - loop_time())):
                    await self._changed.wait()
            except TimeoutError:
                raise RunError(
                    f"no host started a process within {self._timeout_s:g} s; "
                    f"{self.lack(role, gpus)}; check the workers and the network between them "
                    f"and here, and start the workers that are missing, or {RAISE}"
                ) from None

    def _is_one_of_several(self, host: ProcessHost) -> bool:
        """Return whether another host takes the same role. False for this host, whose processes are
        watched directly."""
        role = host.worker.role
        other_hosts = (h for h in self._hosts if h is not host and h.worker.role in ("", role))
        return not host.local and any(other_hosts)

    def _suspect(self, host: ProcessHost) -> None:
        several = self._is_one_of_several(host)
        if not several or host.trial is not None or self._closed or host in self._left:
            return
        host.trial = self._begin(self._try(host))
        host.open_gates()

    async def _try(self, host: ProcessHost) -> None:
        """Return once a process starts there. One start waits for as long as Monarch allows: every
        abandoned start could still come up when the connection returns."""
        while True:
            try:
                name = f"trialx{next(NUMBERS)}"
                process = await self._started(self._spawn_on(host, name, "", 1, ()), None)
            except RunError:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            host.trial = None
            self._begin(self.discard(process))
            self._change()
            return

    async def _end_late(self, start: asyncio.Task[ReplicaProcess]) -> None:
        """End a process that starts after its start was abandoned."""
        with contextlib.suppress(RunError):
            await self.discard(await start)

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` as a background task, which `stop` cancels."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark as retrieved: an abandoned start has no reader

    def _host_of(self, process: ReplicaProcess) -> ProcessHost | None:
        return next((h for h in (*self._hosts, *self._left) if process in h.processes), None)

    def _forget(self, process: ReplicaProcess) -> None:
        host = self._host_of(process)
        if host is not None:
            host.processes.remove(process)
            self._change()

    def _change(self) -> None:
        """Wake the tasks that wait for room, after hosts or their processes changed."""
        self._changed.set()
        self._changed = asyncio.Event()
