"""Keep pools of replicas alive over one or several hosts, each replica in a process of its own.

    service = await Service.of(this_host())
    pool = service.spawn(TeacherReplayActor, n=4, args=(...), role="teacher_replay")
    await pool.settled(60)
    await pool.route("vote", state)
    pool.scale(8)
    await service.stop()

An actor needs one endpoint, `ready`, which returns once the actor can work. Every process is sent
heartbeats a few times a second. A replica becomes SUSPECT, then DEAD, when it is silent; it becomes
DEAD when its process ends or Monarch's supervision reports it. Dead replicas are replaced until
their role's budget of restarts is spent. Then `failure` holds the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import monarch.actor
from monarch.actor import Actor, HostMesh, MeshFailure

from cartridge_forge.protocols.errors import ForgeError, PlaneError, RunError
from cartridge_forge.protocols.plugins import resolve
from cartridge_forge.protocols.ports import TraceSpan
from cartridge_forge.protocols.records.status import ReplicaState
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.protocols.spec.services import HealthSpec
from cartridge_forge.services.awake_clock import keep_awake_time
from cartridge_forge.services.pool.health import IN_SERVICE, HealthState, last_line, silent
from cartridge_forge.services.pool.hosts import HostSource, HostWorker, Membership
from cartridge_forge.services.pool.lifecycle import (
    DRAIN_SECONDS,
    Check,
    Note,
    PoolTemplate,
    Prepare,
    ReplicaLifecycle,
)
from cartridge_forge.services.pool.pool import Pool, Replica
from cartridge_forge.services.pool.process import ProcessHost, ReplicaProcess
from cartridge_forge.services.pool.process_manager import ProcessManager

# Monarch's text for any actor whose process did not answer, in place of the actor's own error.
UNHEARD = "timeout waiting for message from proc mesh agent"
WANT_SECONDS = 8.0  # for a source of hosts to accept a request; less than a call of `forge scale`
BEAT_PERIODS = 4  # from one heartbeat to the next at most, also while replies come
REFUSED_SECONDS = 30.0  # before a refused scaling by load is tried again


class Service:
    """Own processes and the replicas in them. `note(event, **facts)` is called for losses,
    replacements and scalings, `observe(span)` for every request."""

    def __init__(
        self,
        processes: ProcessManager,
        health: HealthSpec,
        call_timeout_s: float,
        spawn_timeout_s: float,
        note: Note,
        observe: Callable[[TraceSpan], None],
    ) -> None:
        self.pools: dict[str, Pool] = {}
        self._lifecycle = ReplicaLifecycle(self.pools, processes, health, spawn_timeout_s, note)
        self._processes = processes
        self._health = health
        self._awake = 0.0  # when this process went on after a pause: silence is judged from there
        self._call_timeout_s, self._spawn_timeout_s = call_timeout_s, spawn_timeout_s
        self._note, self._observe = note, observe
        self._loop = asyncio.get_running_loop()
        self._source: HostSource | None = None
        self._membership: Membership | None = None
        self._lifecycle.begin(self._keep_watch())

    @classmethod
    async def of(
        cls,
        hosts: HostMesh | Sequence[HostMesh] | HostSource,
        *,
        health: HealthSpec | None = None,
        spares: int = 0,
        warm: Callable[[], None] | None = None,
        call_timeout_s: float = 120.0,
        spawn_timeout_s: float = 120.0,
        note: Note = lambda event, **facts: None,
        observe: Callable[[TraceSpan], None] = lambda span: None,
        local: bool = True,
        here: Mapping[str, HostMesh] | None = None,
        needed: Mapping[str, str] | None = None,
        variables: Mapping[str, Sequence[str]] | None = None,
    ) -> Service:
        """Return a service over these hosts; `local` declares that their processes run on this host
        (see services.hosts.source for remote hosts).

        With a source of hosts, the service follows the workers that join and leave. Workers must
        have the `needed` versions (services.hosts.source), and the roles in `here` run on this
        host, in the given mesh. A role's processes keep ordinary environment variables and those
        that `variables` has for it ("" for spares). Raises RunError when the first workers cannot
        be used.

        In the root client, Monarch would end the process for an unhandled death; this call sets
        `unhandled_fault_hook` to `noticed`. An actor calls `noticed` from `__supervise__`.
        """
        health, name = health or HealthSpec(), socket.gethostname()
        processes = ProcessManager(
            health, spares=spares, warm=warm, timeout_s=spawn_timeout_s, variables=variables
        )
        for role, mesh in (here or {}).items():
            processes.join(HostWorker(name, "", role), mesh, local=True)
        keep_awake_time(asyncio.get_running_loop())
        service = cls(processes, health, call_timeout_s, spawn_timeout_s, note, observe)
        if str(monarch.actor.context().actor_instance) == "<root>":
            monarch.actor.unhandled_fault_hook = service.noticed
        if isinstance(hosts, HostMesh | Sequence):
            for i, mesh in enumerate([hosts] if isinstance(hosts, HostMesh) else hosts):
                processes.join(HostWorker(name if local else f"host{i}", ""), mesh, local=local)
            return service
        service._source = hosts
        service._membership = resolve("hooks", "host_membership")(
            hosts, processes, needed or {}, health.dead_after_s, note, service._lifecycle.begin
        )
        assert service._membership is not None
        try:
            await service._membership.open()
        except BaseException:
            await service.stop()
            raise
        return service

    @property
    def failure(self) -> asyncio.Future[None]:
        """Return a future that fails on a spent restart budget or a user's mistake."""
        return self._lifecycle.failure

    @property
    def remote_hosts(self) -> Sequence[ProcessHost]:
        """Return the hosts besides this one on which its processes run."""
        return self._processes.remote_hosts

    def spawn(
        self,
        actor: type[Any],
        *,
        n: int | None = None,
        args: tuple[Any, ...] = (),
        role: str | None = None,
        spec: RoleSpec | None = None,
        prepare: Prepare | None = None,
        check: Check | None = None,
    ) -> Pool:
        """Return a pool of `n` replicas of `actor(*args)`; `Pool.settled` waits for their start.

        `spec` defines processes and routing (`n` overrides its replicas). `prepare(replica)` is
        awaited before a new replica gets its missed updates; `check(process)` before its actor is
        spawned, and raises RunError for an unusable process. Raises RunError for fewer than one
        replica, and for an actor without an endpoint `ready`.
        """
        name = role or actor.__name__.removesuffix("Actor").lower()
        if name in self.pools:
            raise RunError(f"there is a pool {name} already; give the second another role name")
        _require_ready(actor)
        spec = spec or RoleSpec()
        if n is not None:
            if n < 1:
                raise RunError(f"{name} cannot have {n} replicas; give n=1 or more")
            spec = spec.model_copy(update={"replicas": n})
        pool = Pool(name, spec, self._call_timeout_s, self._observe)
        pool.resize = self._lifecycle.resize
        pool.report_death = self._lifecycle.lost
        self._lifecycle.roles[name] = PoolTemplate(actor, args, prepare, check)
        self.pools[name] = pool
        self._lifecycle.resize(pool)
        return pool

    async def scale(self, role: str, replicas: int) -> None:
        """Set a pool's target, and change the number of hosts where hosts belong to one role.

        To grow, hosts are requested first; raises RunError, and changes nothing, when refused. To
        shrink, replicas drain and then hosts are given back, both in the background.
        """
        pool, source = self.pools[role], self._source
        async with self._lifecycle.roles[role].scaling:
            previous = pool.target
            if replicas > previous and source is not None:
                await self._want(source, role, replicas)
            pool.scale(replicas)
        if replicas < previous and source is not None:
            self._lifecycle.begin(self._give_back(source, pool, replicas))

    async def _want(self, source: HostSource, role: str, replicas: int) -> None:
        try:
            async with asyncio.timeout(WANT_SECONDS):
                await source.want(role, replicas)
        except TimeoutError as error:
            raise RunError(
                f"hosts for {replicas} replicas of {role} were asked for, and nobody answered "
                f"within {WANT_SECONDS:g} s; look at where the hosts come from, and scale again"
            ) from error

    async def _give_back(self, source: HostSource, pool: Pool, replicas: int) -> None:
        """Request fewer hosts once the surplus replicas are gone."""
        # Replicas left on the hosts are then moved.
        with contextlib.suppress(TimeoutError, ForgeError):
            await pool.settled(DRAIN_SECONDS)
        async with self._lifecycle.roles[pool.role].scaling:
            if pool.target == replicas:  # not scaled again meanwhile
                try:
                    await self._want(source, pool.role, replicas)
                except ForgeError as error:
                    self._note("failed", error="scale", message=str(error))

    def warm(self, threads: Sequence[int]) -> None:
        """Start one spare process in the background for each entry, with that many threads."""
        self._processes.warm(threads)

    async def ready(self) -> None:
        """Wait until every pool is settled, for as long as any start makes progress. Raises
        `failure`, or RunError after `spawn_timeout_s` without any."""
        window = max(self._spawn_timeout_s, self._health.dead_after_s)
        for pool in list(self.pools.values()):
            waiting = asyncio.ensure_future(pool.settled(math.inf))
            either: set[asyncio.Future[Any]] = {waiting, self.failure}
            idle = 0  # windows without progress
            try:
                while not (waiting.done() or self.failure.done()):
                    progress = self._progress()
                    await asyncio.wait(either, timeout=window, return_when=asyncio.FIRST_COMPLETED)
                    idle = idle + 1 if self._progress() == progress else 0
                    # A replica that has a process is given up by its own start within two.
                    unplaced = any(r.process is None for r in pool.replicas)
                    if idle >= (1 if unplaced else 3) and not waiting.done():
                        states = pool.states()
                        if unplaced:
                            wanted = pool.spec.procs * pool.spec.gpus
                            states += f"; {self._processes.lack(pool.role, wanted)}"
                        raise RunError(
                            f"{pool.role} starting made no progress for {idle * window:g} s "
                            f"({states}); raise spawn_timeout_s in the mesh file if it needs longer"
                        )
                if not waiting.done():
                    self.failure.result()
                waiting.result()
            finally:
                waiting.cancel()

    def _progress(self) -> list[object]:
        """Return what changes while a start goes on."""
        return [
            (r.name, r.generation, r.state, r.process and (r.process.pids, r.process.progress))
            for pool in self.pools.values()
            for r in pool.replicas
        ]

    def keep_spares(self) -> None:
        """Keep warm spares from now on. Called once nothing else needs the cores to start."""
        self._processes.keep_spares()

    async def stop(self) -> None:
        """Stop every replica and process, the silent ones too, and give the hosts back."""
        await self._lifecycle.stop()
        if self._membership is not None:
            await self._membership.close()

    def lacking(self) -> Sequence[str]:
        """Return what hosts lack that were requested and are not there; nothing on one host."""
        return () if self._membership is None else self._membership.lacking()

    def noticed(self, failure: MeshFailure) -> bool:
        """Handle a report of Monarch's supervision, from any thread. Returns True (handled)."""
        name, report = failure.mesh_name or "", str(failure)
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(
                self._supervised, name, report, context=self._lifecycle.context
            )
        return True

    # -- watching -------------------------------------------------------------------------------

    async def _keep_watch(self) -> None:
        """Send heartbeats to all processes, judge silent replicas, and scale pools by load."""
        pause = self._health.heartbeat_s
        due = time.monotonic()
        while True:
            # This process was held up: a replica that seems silent may have answered meanwhile.
            late = time.monotonic() - due > pause
            if time.monotonic() - due > self._health.suspect_after_s:
                self._awake = time.monotonic()  # a pause, of all processes perhaps
            for pool in list(self.pools.values()):
                for replica in list(pool.replicas):
                    self._look_at(replica, late)
                self._autoscale(pool)
            self._processes.mind()
            self._lifecycle.leave()
            self._lifecycle.balance()
            due = time.monotonic() + pause
            await asyncio.sleep(pause)

    def _look_at(self, replica: Replica, late: bool) -> None:
        process = replica.process
        if process is None or replica.ended:
            return
        if process.local:
            if not self._replies(replica, process):
                self._lifecycle.begin(self._beat(replica, process))
        else:  # asked by `ProcessManager.mind`, with the others of its host
            replica.beaten = max(replica.beaten, process.last_beat)
            replica.memory_bytes = process.memory_bytes
        if late or (process.local and replica.state not in IN_SERVICE):
            return
        silent_s = time.monotonic() - max(replica.beaten, self._awake)
        life = silent(replica.life, silent_s, self._health)
        if life.over or self._lifecycle.lost_host(replica):
            self._lifecycle.lost(replica, f"it was silent for {self._health.dead_after_s:g} s")
        elif life.takes_requests and not replica.life.takes_requests:
            self._lifecycle.begin(self._trust_again(replica, life))
        else:
            replica.life = life

    def _replies(self, replica: Replica, process: ReplicaProcess) -> bool:
        """Return whether a reply to a call stands for this period's heartbeat. Every BEAT_PERIODS a
        heartbeat is sent all the same, for it tells of memory and work."""
        now, period = time.monotonic(), self._health.heartbeat_s
        return now - replica.beaten < period and process.silent_s < BEAT_PERIODS * period

    async def _beat(self, replica: Replica, process: ReplicaProcess) -> None:
        try:
            async with asyncio.timeout(self._health.dead_after_s):
                memory_bytes = await process.beat()
        except Exception:  # `_look_at` judges silence, supervision a death
            return
        replica.beaten = time.monotonic()
        replica.memory_bytes = memory_bytes

    async def _trust_again(self, replica: Replica, life: HealthState) -> None:
        """Return a replica that answers again to service, after its missed updates are sent."""
        pool = self.pools[replica.role]
        try:
            await pool.catch_up(replica)
        except PlaneError:  # the store is being replaced: the next heartbeat tries again
            return
        except Exception as error:
            return self._lifecycle.lost(
                replica, f"it cannot be told what it missed: {last_line(error)}"
            )
        if replica.state is ReplicaState.SUSPECT and not pool.missed(replica):
            replica.life = life
            pool.changed()

    def _supervised(self, mesh_name: str, report: str) -> None:
        """Find the replica of a report, which names the failed actor mesh plus a suffix."""
        name = mesh_name.rpartition("-")[0]
        for replica in [r for pool in self.pools.values() for r in pool.replicas]:
            process = replica.process
            if process is None:
                continue
            heartbeat = f"{process.name}heartbeat"
            if name in (heartbeat, replica.actor_name):
                process.given_up |= name == heartbeat or UNHEARD in report
                self._lifecycle.lost(replica, last_reason(report))
            elif pid := process.ended_pid():  # another actor failed: TorchStore's, Monarch's logger
                self._lifecycle.lost(replica, f"its process {pid} has ended")

    def _autoscale(self, pool: Pool) -> None:
        role, spec = self._lifecycle.roles[pool.role], pool.spec.autoscale
        if spec is None:
            return
        load = len(pool.in_flight)
        decide = resolve("hooks", "autoscale")
        role.loads, wanted = decide(role.loads, time.monotonic(), load, pool.target, spec)
        if wanted != pool.target and not role.scaling.locked() and time.monotonic() >= role.wait:
            self._lifecycle.begin(self._follow_load(role, pool, wanted))

    async def _follow_load(self, role: PoolTemplate, pool: Pool, wanted: int) -> None:
        previous = pool.target
        try:
            await self.scale(pool.role, wanted)
        except ForgeError as error:
            role.wait = time.monotonic() + REFUSED_SECONDS
            if str(error) != role.refused:
                self._note("failed", error="scale", message=str(error))
            role.refused = str(error)
        else:
            role.refused = ""
            self._note("scaled", role=pool.role, replicas=wanted, before=previous, by="load")


def _require_ready(actor: type[Any]) -> None:
    """Raise RunError for an actor that nothing could wait for: it would seem to start for as long
    as a start may take."""
    ready = getattr(actor, "ready", None)
    if ready is None:
        lack = f"{actor.__name__} has no endpoint `ready`; add one"
    elif issubclass(actor, Actor) and inspect.isfunction(ready):
        lack = f"{actor.__name__}.ready is no endpoint; decorate it with `@endpoint`"
    else:
        return
    raise RunError(f"{lack}, which returns once the actor can work")


def last_reason(report: str) -> str:
    """Return the last line of Monarch's failure report `MeshFailure(... lines ...)`."""
    lines = [line.strip() for line in report.strip().removesuffix(")").splitlines()]
    return next((line[:300] for line in reversed(lines) if line), "Monarch reported a failure")
