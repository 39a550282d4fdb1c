"""Hold a replica's process, or its ranks, each with a heartbeat actor, and the host they run on.

Apart from the client that starts the controller, only this module calls `spawn_procs`. It also
checks the files that several hosts must share: the run directory and the model. The host on which a
process starts is chosen by pure functions over hosts and their load:

free GPUs            only hosts that have as many as the process asks for, where that is known
own workers first    a role's replicas go to the workers of that role, else to those of any
fullest first        a process with GPUs goes where the fewest are left that suffice, so that
                     one which asks for a whole host finds it
fewest first         of hosts with room, the one with the fewest processes, the earlier of equals
spares               only on workers of any role and any number, so a spare takes no replica's slot
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from monarch.actor import HostMesh, ProcMesh

from cartridge_forge.actors.base import bootstrap, bootstrap_command, gpus_here
from cartridge_forge.actors.heartbeat import Heartbeat, HeartbeatActor, HeartbeatHandle
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.step import NOT_BEGUN, Preparation
from cartridge_forge.services.pool.hosts import HostWorker, finish
from cartridge_forge.services.proc_info import has_ended

ALONE = 2.0  # times dead_after_s without a heartbeat, after which a remote process exits
PROGRESS_BYTES = 16 * 2**20  # a process that loads takes more, an idle one does not
STOP_SECONDS = 3.0  # an idle process stops in 0.5 s, a computing one after its computation

T = TypeVar("T")


@dataclass(eq=False)
class ReplicaProcess:
    """Hold one process, or `ranks` of one host that start and end together. It has answered when
    all ranks have, and has ended when any rank has. `pids` is empty until all have answered;
    `last_beat` is the last time they did (monotonic seconds), `memory_bytes` and `work` their
    resident memory and count of work then. `gone` is the id of a remote process that has ended, 0
    until its host tells of it (`plugins.cluster.hosts.host_heartbeats`). `given_up` is set once
    Monarch reports the process lost, which it may also do for one that was paused too long. `gpus`
    are the devices of the host that it sees; `taken` is set once a replica uses it, `ending` once
    it is being ended."""

    name: str
    host: str
    procs: ProcMesh
    heartbeats: Sequence[Any]
    local: bool
    gpus: tuple[int, ...] = ()
    taken: bool = False
    ending: bool = False
    pids: tuple[int, ...] = ()
    given_up: bool = False
    work: int = 0
    memory_bytes: int = 0
    most_bytes: int = 0
    prepared: Preparation = NOT_BEGUN
    gone: int = 0
    last_beat: float = field(default_factory=time.monotonic)
    _watched: dict[int, asyncio.AbstractEventLoop] = field(default_factory=dict)
    _on_end: Callable[[int], None] | None = None

    @property
    def heartbeat(self) -> Any:
        """Return the calls of the heartbeat actor of the process, or of rank 0."""
        return self.heartbeats[0]

    @property
    def pid(self) -> int:
        """Return the id of the process, or of rank 0; 0 until it has answered."""
        return self.pids[0] if self.pids else 0

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.last_beat

    async def beat(self) -> int:
        """Send a heartbeat to all ranks and return their resident memory in bytes."""
        beats: list[Heartbeat] = await asyncio.gather(*(p.beat.call_one() for p in self.heartbeats))
        self.hear(beats, time.monotonic())
        return self.memory_bytes

    def hear(self, beats: Sequence[Heartbeat], at: float) -> None:
        """Take the heartbeats of all ranks, answered `at` monotonic seconds. Of those that overtook
        each other the newest counts."""
        if at <= self.last_beat and self.pids:
            return
        self.pids, self.last_beat = tuple(beat.pid for beat in beats), at
        self.work = sum(beat.work for beat in beats)
        self.memory_bytes = sum(beat.memory_bytes for beat in beats)
        self.most_bytes = max(self.most_bytes, self.memory_bytes)
        self.prepared = min((beat.prepared for beat in beats), key=lambda p: p.share)

    @property
    def progress(self) -> tuple[int, int]:
        """Return what grows while a start goes on: the work that was done, and the memory that was
        taken at most, in steps that no idle process takes."""
        return self.work, self.most_bytes // PROGRESS_BYTES

    def has_gone(self, pid: int) -> None:
        """Take the news that this remote process has ended."""
        if self.gone:
            return
        self.gone = pid
        if self._on_end is not None:
            self._on_end(pid)

    def watch(self, ended: Callable[[int], None]) -> None:
        """Call `ended` with the id of the process, in the running loop: as soon as a local one has
        ended, once its host has told of it for a remote one."""
        loop = asyncio.get_running_loop()
        if not self.local:
            self._on_end = ended
            if self.gone:
                loop.call_soon(ended, self.gone)
        for pid in self.pids if self.local else ():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:  # it has ended, and somebody has waited for it
                loop.call_soon(ended, pid)
                continue
            self._watched[descriptor] = loop
            loop.add_reader(descriptor, self._see, descriptor, ended, pid)

    def _see(self, descriptor: int, ended: Callable[[int], None], pid: int) -> None:
        self._unwatch(descriptor)
        ended(pid)

    def _unwatch(self, descriptor: int) -> None:
        self._watched.pop(descriptor).remove_reader(descriptor)
        os.close(descriptor)

    def ended_pid(self) -> int:
        """Return the id of a process that has ended, 0 for none. The end of a remote one is known
        once its host has told of it."""
        return next((pid for pid in self.pids if has_ended(pid)), 0) if self.local else self.gone

    async def end(self) -> None:
        """Stop the process, or kill it: a paused (SIGSTOP) process never answers."""
        self.ending, self._on_end = True, None
        for descriptor in list(self._watched):
            self._unwatch(descriptor)
        with contextlib.suppress(Exception):  # a failed stop is followed by a kill
            await asyncio.wait_for(finish(self.procs.stop()), STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        for pid in self.pids if self.local else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclass(eq=False)
class ProcessHost:
    """Hold a host on which processes are started, and its `processes`, also those that start or
    end. `trial` runs while the host is suspect, and ends once a process has started there again.
    `gates` are resolved when the host becomes suspect or is left. Processes of a `local` host can
    be killed, and their ends are seen. `beside` are processes that take no replica's place."""

    worker: HostWorker
    mesh: HostMesh
    local: bool
    processes: list[ReplicaProcess] = field(default_factory=list)
    beside: list[ReplicaProcess] = field(default_factory=list)
    gates: set[asyncio.Future[None]] = field(default_factory=set)
    trial: asyncio.Task[None] | None = None

    @property
    def label(self) -> str:
        return self.worker.name

    @property
    def well(self) -> bool:
        return self.trial is None

    @property
    def has_room(self) -> bool:
        return not self.worker.capacity or len(self.processes) < self.worker.capacity

    @property
    def free_gpus(self) -> int | None:
        """Return how many devices no process here has; None where they are not known, and on this
        host, where roles may share one."""
        if self.local or self.worker.gpus is None:
            return None
        return max(0, self.worker.gpus - len(self._used()))

    def _used(self) -> Counter[int]:
        return Counter(device for process in self.processes for device in process.gpus)

    def fits(self, role: str) -> bool:
        """Return whether a process of that role ("" for a spare) may ever start there."""
        return self.worker.role in ("", role) and bool(role or not self.worker.capacity)

    def spawn(
        self,
        name: str,
        threads: int,
        gpus: Sequence[int],
        ranks: int,
        alone_s: float | None,
        variables: Sequence[str],
    ) -> ReplicaProcess:
        """Return a starting process, which counts at once for the next choice of a host.

        `gpus`: devices of all ranks on this host; on a remote host, as many free ones. Without a
        heartbeat for `alone_s` seconds it ends itself. Of the host's environment it keeps ordinary
        variables and `variables`. Raises RunError.
        """
        used = self._used()
        devices = tuple(d for d in range(len(used) + len(gpus)) if d not in used)[: len(gpus)]
        if self.local and gpus and (gpu_count := gpus_here()):
            # With too few GPUs, processes share those that the fewest processes use.
            devices = tuple(sorted(range(gpu_count), key=lambda device: used[device])[: len(gpus)])
        process = self.spawn_beside(name, threads, devices, ranks, alone_s, variables)
        self.processes.append(process)
        return process

    def spawn_beside(
        self,
        name: str,
        threads: int,
        devices: tuple[int, ...],
        ranks: int,
        alone_s: float | None,
        variables: Sequence[str],
        beating: type[HeartbeatActor] = HeartbeatActor,
    ) -> ReplicaProcess:
        """Return a starting process that takes no replica's place here: its caller ends it. It has
        an actor of the class `beating` for heartbeats. Raises RunError."""
        host = "" if self.local else self.label
        try:
            procs = self.mesh.spawn_procs(
                per_host={"procs": ranks},
                name=name,
                bootstrap=bootstrap(threads, devices, ranks, variables, host),
                bootstrap_command=bootstrap_command() if self.local else None,
            )
            actors = by_rank(procs.spawn(f"{name}heartbeat", beating, alone_s), ranks)
        except Exception as error:
            raise RunError(f"{self.label} started no process {name}: {error!r}") from error
        heartbeats = [HeartbeatHandle(actor) for actor in actors]
        return ReplicaProcess(name, self.label, procs, heartbeats, self.local, devices)

    def open_gates(self) -> None:
        """Wake all tasks that wait for this host, so that they give it up."""
        for gate in self.gates:
            if not gate.done():
                gate.set_result(None)

    async def unless_lost(self, work: asyncio.Task[T], limit: float) -> T:
        """Return the result of `work`. Raises RunError when the host becomes suspect or is left, or
        after `limit` seconds; `work` then continues alone."""
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gates.add(gate)
        try:
            either: set[asyncio.Future[Any]] = {work, gate}
            await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.gates.remove(gate)
        if not work.done():
            raise RunError(
                f"{self.label} does not answer; raise spawn_timeout_s in the mesh file if a start "
                f"there takes more than {limit:g} s"
            )
        return work.result()


def by_rank(actors: Any, ranks: int) -> list[Any]:
    """Return one handle for each rank of an actor mesh."""
    return [actors] if ranks == 1 else [actors.slice(procs=rank) for rank in range(ranks)]


def choose(
    hosts: Sequence[ProcessHost], role: str, without: ProcessHost | None = None, gpus: int = 0
) -> ProcessHost | None:
    """Return the host for one more process of the role ("" for a spare) with so many `gpus`, or
    None."""
    free = [
        h
        for h in hosts
        if h is not without and h.well and h.fits(role) and h.has_room and _has_gpus(h, gpus)
    ]

    def order(h: ProcessHost) -> tuple[bool, int, int]:
        return h.worker.role != role, (h.free_gpus or 0) if gpus else 0, len(h.processes)

    return min(free, key=order, default=None)


def never_fits(hosts: Sequence[ProcessHost], role: str, gpus: int) -> bool:
    """Return whether each worker of the role has too few GPUs for the process, even with no other
    process there."""
    gpu_counts = [h.worker.gpus for h in hosts if h.fits(role) and not h.local]
    return bool(gpu_counts) and all(have is not None and have < gpus for have in gpu_counts)


def _has_gpus(host: ProcessHost, gpus: int) -> bool:
    free = host.free_gpus
    return not gpus or free is None or free >= gpus


def lack(hosts: Sequence[ProcessHost], role: str, gpus: int = 0) -> str:
    """Return a message why no process of the role starts, such as `"2 workers take generator: 1
    full, 1 silent"`, and for one with `gpus` how many each worker has left."""
    fit = [host for host in hosts if host.fits(role)]
    if not fit:
        return f"no worker takes {role or 'spares'}"
    silent = sum(not host.well for host in fit)
    full = sum(host.well and not host.has_room for host in fit)
    workers = "1 worker takes" if len(fit) == 1 else f"{len(fit)} workers take"
    summary = f"{workers} {role or 'spares'}: {full} full, {silent} silent"
    free_texts = [
        f"{h.free_gpus} of {h.worker.gpus} on {h.label}" for h in fit if not _has_gpus(h, gpus)
    ]
    return (
        f"{summary}; free GPUs: {', '.join(free_texts)}, and {gpus} wanted"
        if free_texts
        else summary
    )


def crowded(hosts: Sequence[ProcessHost], working: Sequence[int]) -> int | None:
    """Return the index of a host with at least two more working processes than another host of its
    role that has room, or None."""
    for role in sorted({host.worker.role for host in hosts}):
        alike = [i for i, host in enumerate(hosts) if host.worker.role == role and host.well]
        least = min((working[i] for i in alike if hosts[i].has_room), default=None)
        most = max(alike, key=lambda i: working[i], default=None)
        if least is not None and most is not None and working[most] - least >= 2:
            return most
    return None
