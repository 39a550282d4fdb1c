"""Start replicas, replace lost ones, drain surplus ones and move them between hosts.

start   process -> actor -> `prepare` -> missed updates -> service
lost    calls end, the process is ended, a successor starts while the restart budget lasts; an
        engine's death is no loss of this budget, because a request fails after its second one
drain   takes no new requests; ended once it has none
move    drained when its host is left or crowded; its successor starts on another host
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from cartridge_forge.protocols.errors import ForgeError, HostsEndedError, PlaneError, RunError
from cartridge_forge.protocols.records.status import ReplicaState
from cartridge_forge.protocols.spec.services import HealthSpec
from cartridge_forge.services.awake_clock import loop_time
from cartridge_forge.services.pool.health import (
    IN_SERVICE,
    ReplicaLost,
    drained,
    last_line,
    refitted,
)
from cartridge_forge.services.pool.pool import Pool, Replica, ask
from cartridge_forge.services.pool.process import ReplicaProcess, by_rank
from cartridge_forge.services.pool.process_manager import ProcessManager
from cartridge_forge.services.pool.sizes import Loads

RETRY_SECONDS = 0.5  # doubled by every further start that fails
LONGEST_PAUSE_SECONDS = 8.0
TOLD_SECONDS = 1.0  # at most between Monarch's word of a process's end and its parent's
DRAIN_SECONDS = 120.0
MOVE_PAUSE_SECONDS = 10.0  # after a move to another host that failed

Prepare = Callable[[Replica], Awaitable[None]]
Check = Callable[[ReplicaProcess], Awaitable[None]]
Note = Callable[..., None]


@dataclass
class PoolTemplate:
    """Hold the arguments for new replicas of a pool, and the load that its size follows. `check`
    raises RunError for a process in which the actor cannot work."""

    actor: type[Any]
    args: tuple[Any, ...]
    prepare: Prepare | None
    check: Check | None = None
    loads: Loads = ()
    scaling: asyncio.Lock = field(default_factory=asyncio.Lock)
    refused: str = ""  # error of the last scaling by load
    wait: float = 0.0  # time (monotonic seconds) before which no scaling by load is tried


class ReplicaLifecycle:
    """Carry out the decisions of `services.pool.service`, which finds lost replicas.

    `pools` belongs to the service. `failure` fails when the service cannot recover.
    """

    def __init__(
        self,
        pools: Mapping[str, Pool],
        processes: ProcessManager,
        health: HealthSpec,
        spawn_timeout_s: float,
        note: Note,
    ) -> None:
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.roles: dict[str, PoolTemplate] = {}
        # Monarch identifies the caller by a context variable. Code that starts processes must run
        # in the owner's context, whichever request or report triggered it.
        self.context = contextvars.copy_context()
        self._pools, self._processes, self._health = pools, processes, health
        self._spawn_timeout_s, self._note = spawn_timeout_s, note
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = self._moving = False
        self._lost_at: dict[tuple[str, int], float] = {}

    async def stop(self) -> None:
        """End every replica and process, the silent ones too."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pool in self._pools.values():
            pool.close("the service was stopped")
        await self._processes.stop()
        if self.failure.done():
            self.failure.exception()  # mark as retrieved
        else:
            self.failure.cancel()

    def resize(self, pool: Pool) -> None:
        """Start missing replicas and drain surplus ones. Replicas on the last of the role's own
        workers drain first, otherwise those in the highest slots."""
        staying = _staying(pool)
        for replica in sorted(staying, key=self._rank)[pool.target :]:
            replica.life = drained(replica.life)
            self.begin(self._drain(pool, replica))
        used_slots = {r.slot for r in pool.replicas}
        slots = (s for s in range(len(used_slots) + pool.target) if s not in used_slots)
        for slot in [next(slots) for _ in range(pool.target - len(staying))]:
            replica = Replica(pool.role, slot)
            pool.replicas.append(replica)
            self.begin(self._live(pool, replica))
        pool.changed()

    def _rank(self, replica: Replica) -> tuple[int, int]:
        on = self._processes.rank(replica.process) if replica.process is not None else 0
        return on, replica.slot

    async def _live(self, pool: Pool, replica: Replica, failures: int = 0) -> None:
        """Bring a replica into service, or replace it; so many starts before it failed."""
        try:
            await self._start(pool, replica, self.roles[pool.role])
        except Exception as error:
            drained_away = replica not in pool.replicas or replica.state is ReplicaState.DRAINING
            if self._stopping or drained_away:
                return
            if isinstance(error, ForgeError) and not isinstance(error, RunError | PlaneError):
                return self._fail(error)  # a user's mistake: another try would fail the same way
            replica.end(replica.ended or last_line(error))
            if not pool.served and not await self._is_lost(replica, error):
                return self._fail(RunError(f"{replica.name} does not start: {replica.ended}"))
            await self._bury(pool, replica, failures + 1)
            return
        if replica.process is None:  # scaled down before its process started
            return
        pool.served = True
        lost_at = self._lost_at.pop((pool.role, replica.slot), None)
        if lost_at is not None:
            self._note(
                "replica_back", role=pool.role, replica=replica.name,
                seconds=round(time.monotonic() - lost_at, 3), pid=replica.process.pid,
            )  # fmt: skip

    async def _is_lost(self, replica: Replica, error: Exception) -> bool:
        """Return whether a replica whose start failed has lost its process or host. Monarch may
        tell of the end of a process before its parent does."""
        process = replica.process
        if process is None:
            return True
        until = time.monotonic() + (TOLD_SECONDS if isinstance(error, ReplicaLost) else 0.0)
        while not (process.ended_pid() or process.given_up or self.lost_host(replica)):
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(0.02)
        return True

    async def _start(
        self,
        pool: Pool,
        replica: Replica,
        role: PoolTemplate,
        away_from: ReplicaProcess | None = None,
    ) -> None:
        """Start process and actor, call `prepare`, send missed updates, and put it into service."""
        spec = pool.spec
        gpus_each = spec.procs * spec.gpus
        gpus = range(replica.slot * gpus_each, (replica.slot + 1) * gpus_each)
        name = f"{pool.role.replace('_', '')}{replica.slot}"  # Monarch: letters and digits only
        process = await self._processes.take(
            name, spec.threads, gpus, away_from, pool.role, spec.procs
        )
        if replica.state is ReplicaState.DRAINING:  # scaled down meanwhile
            return await self._processes.discard(process)
        replica.process, replica.beaten = process, time.monotonic()
        process.watch(lambda pid: self.lost(replica, f"its process {pid} has ended"))
        if role.check is not None:
            await role.check(process)
        replica.actor_name = f"{name}on{process.name}"
        actors = process.procs.spawn(replica.actor_name, role.actor, *role.args)
        replica.actor, *replica.others = by_rank(actors, spec.procs)
        await self._answered(replica, process)
        replica.beaten = time.monotonic()
        deadline = loop_time() + self._spawn_timeout_s
        if role.prepare is not None:
            await role.prepare(replica)
        while not replica.ended and pool.missed(replica):
            try:
                await pool.catch_up(replica)
            except PlaneError:  # the store is being replaced; its tensors get new keys
                if loop_time() > deadline:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
        if replica.ended:
            raise ReplicaLost(replica.ended)
        replica.life = refitted(replica.life)
        pool.changed()

    async def _answered(self, replica: Replica, process: ReplicaProcess) -> None:
        """Wait until the replica is ready, for as long as its process makes progress. Raises
        RunError after `spawn_timeout_s` without any."""
        # Progress is heard of with heartbeats, of which some may be late.
        window = max(self._spawn_timeout_s, self._health.dead_after_s)
        answer = asyncio.ensure_future(ask(replica, "ready", (), math.inf))
        try:
            while True:
                progress = process.progress
                await asyncio.wait({answer}, timeout=window)
                if answer.done():
                    return answer.result()
                if process.progress == progress:
                    raise RunError(
                        f"it made no progress for {window:g} s; raise spawn_timeout_s in the mesh "
                        f"file, or by --set spawn_timeout_s={2 * window:g}, if it needs longer"
                    )
        finally:
            answer.cancel()

    def lost(self, replica: Replica, reason: str) -> None:
        """Fail the calls of a dead replica, and replace it."""
        pool = self._pools[replica.role]
        if replica.ended or self._stopping:
            return
        served = replica.state in IN_SERVICE
        replica.end(reason)
        pool.changed()
        if not served:  # the task that starts or drains it sees `ended`
            return
        self._lost_at[pool.role, replica.slot] = time.monotonic()
        cause = "engine" if replica.engine_died else "process"
        self._note("replica_lost", role=pool.role, replica=replica.name, cause=cause, reason=reason)
        self.begin(self._bury(pool, replica))

    async def _bury(self, pool: Pool, replica: Replica, failures: int = 0) -> None:
        """End what is left of a dead replica, and replace it within the role's restart budget, the
        later the more starts in a row failed."""
        if replica.process is not None:
            if not replica.engine_died:
                self._processes.lost(replica.process)
            self.begin(self._discard(replica, replica.process))
        pool.forget(replica)
        if self._stopping or len(_staying(pool)) >= pool.target:  # scaled down meanwhile
            return
        pool.restarts += 1
        pool.engine_deaths += replica.engine_died
        if pool.restarts - pool.engine_deaths > pool.spec.restarts:
            return self._fail(
                RunError(
                    f"{replica.name} died, and roles.{pool.role}.restarts ({pool.spec.restarts}) "
                    f"are used up; the last reason: {replica.ended}"
                )
            )
        successor = _add_successor(pool, replica)
        if replica.process is None or failures > 1:
            doubled = RETRY_SECONDS * 2.0 ** max(failures - 2, 0)
            await asyncio.sleep(min(doubled, LONGEST_PAUSE_SECONDS))
        self.begin(self._live(pool, successor, failures))  # awaited, failures would nest for ever

    async def _discard(self, replica: Replica, process: ReplicaProcess) -> None:
        """End a dead replica's process, once its last replies have come, or could have."""
        until = time.monotonic() + TOLD_SECONDS
        while replica.calls:
            if time.monotonic() > until:
                replica.calls.end()
            await asyncio.sleep(0.02)
        await self._processes.discard(process)

    async def _drain(self, pool: Pool, replica: Replica) -> None:
        """End a replica once its requests have ended."""
        start = time.monotonic()
        while replica.ongoing and not replica.ended:
            if time.monotonic() - start > DRAIN_SECONDS:
                replica.end("it was to be gone, and its requests did not end")
            await asyncio.sleep(0.02)
        pool.forget(replica)
        if replica.process is not None:
            await self._processes.discard(replica.process)

    def balance(self) -> None:
        """Move replicas one at a time from a crowded host to one that has come back."""
        pools = [p for p in self._pools.values() if self.roles[p.role].prepare is None]
        if self._moving or not all(p.is_settled() for p in self._pools.values()):
            return
        crowded = self._processes.crowded()
        movable = ((p, r) for p in pools for r in reversed(p.replicas) if r.process in crowded)
        chosen = next(movable, None)
        if chosen is not None:
            self._moving = True
            self.begin(self._move(*chosen))

    def leave(self) -> None:
        """Drain replicas on hosts that are being left, and start successors, at every heartbeat."""
        leaving = self._processes.leaving()
        for pool in self._pools.values() if leaving else ():
            for replica in [r for r in _staying(pool) if r.process in leaving]:
                replica.life = drained(replica.life)
                self._note("replica_moved", role=pool.role, replica=replica.name)
                self.begin(self._hand_over(pool, replica, _add_successor(pool, replica)))

    async def _hand_over(self, pool: Pool, replica: Replica, successor: Replica) -> None:
        """Drain a replica and start its successor. Both run at once, unless the role has a
        `prepare`, which continues from the state of the drained replica."""
        draining = self.begin(self._drain(pool, replica))
        if self.roles[pool.role].prepare is not None:
            await asyncio.wait({draining})
        if successor in _staying(pool):  # not scaled down meanwhile
            await self._live(pool, successor)

    async def _move(self, pool: Pool, replica: Replica) -> None:
        """Start a replica's successor on another host, and drain the replica once that serves."""
        successor = _add_successor(pool, replica)
        try:
            await self._start(pool, successor, self.roles[pool.role], replica.process)
        except Exception as error:
            successor.end(last_line(error))
            pool.forget(successor)
            if successor.process is not None:
                await self._processes.discard(successor.process)
            await asyncio.sleep(MOVE_PAUSE_SECONDS)
        else:
            if successor.life.takes_requests and not replica.ended:
                replica.life = drained(replica.life)
                self._note("replica_moved", role=pool.role, replica=replica.name)
                await self._drain(pool, replica)
        finally:
            self._moving = False
            if not self._stopping:
                self.resize(pool)  # for replicas scaled or lost meanwhile

    def _fail(self, error: ForgeError) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)
        for pool in self._pools.values():
            pool.failed = pool.failed or error
            pool.changed()

    def lost_host(self, replica: Replica) -> bool:
        """Return whether a remote replica, starting or not, was silent for `dead_after_s`. Nobody
        tells of the end of a whole host, so silence counts as loss."""
        away = replica.process is not None and not replica.process.local
        return away and time.monotonic() - replica.beaten >= self._health.dead_after_s

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` as a background task, which `stop` cancels."""
        task = asyncio.create_task(work, context=self.context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # No task raises for the loss of a replica, so any other is a bug in this package.
            if not isinstance(error, HostsEndedError):
                error = RunError(f"the service failed: {error!r}")
            self._fail(error)


def _add_successor(pool: Pool, replica: Replica) -> Replica:
    """Add the replica's next generation to the pool, in the same slot, and return it."""
    successor = Replica(pool.role, replica.slot, replica.generation + 1)
    pool.replicas.append(successor)
    pool.replicas.sort(key=lambda r: r.slot)
    return successor


def _staying(pool: Pool) -> list[Replica]:
    """Return the replicas that serve or start, without draining and dead ones."""
    return [r for r in pool.replicas if r.state is not ReplicaState.DRAINING and not r.life.over]
