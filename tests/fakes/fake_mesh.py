"""A mesh without processes: actors in this one, that can be killed and stopped, and a clock that
does not wait. Services and pools are the real ones.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from cartridge_forge.actors.heartbeat import Heartbeat
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.ports import TraceSpan
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.protocols.spec.services import HealthSpec
from cartridge_forge.services.clients import Packed
from cartridge_forge.services.pool import process as process_module
from cartridge_forge.services.pool.health import HealthState, refitted
from cartridge_forge.services.pool.pool import Pool, Replica
from cartridge_forge.services.pool.service import Service

HEALTH = HealthSpec(heartbeat_s=0.5, suspect_after_s=2.0, dead_after_s=5.0)


# -- time ---------------------------------------------------------------------------------------


_monotonic = time.monotonic


class _Clock(selectors.DefaultSelector):
    """A selector that, where it would wait, lets the time pass instead: in its own thread. The loop
    of another, as of a server that tests share, would sleep till this clock's time otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self._thread = threading.get_ident()

    def time(self) -> float:
        return self.now if threading.get_ident() == self._thread else _monotonic()

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits, and nothing will ever come"
            self.now += timeout
        return ready


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    """The scenario's result, at once: seconds of `asyncio` and `time.monotonic` are not waited
    for. Whatever fails unseen meanwhile is a failure."""
    unseen: list[dict[str, Any]] = []

    async def watched() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        return await scenario

    clock = _Clock()
    with (
        mock.patch.object(time, "monotonic", clock.time),
        # What fake processes spawn are their heartbeats' calls already, without an actor.
        mock.patch.object(process_module, "HeartbeatHandle", lambda calls: calls),
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner,
    ):
        result = runner.run(watched())
    assert not unseen, unseen
    return result


# -- actors and processes -----------------------------------------------------------------------


@dataclass(eq=False)
class FakeProcess:
    """Holds an actor, or the actors of several `ranks`. `die` and `stop` are kill -9 and SIGSTOP of
    all, `lose` kill -9 of one rank; what was begun when it is stopped is answered after `go_on`."""

    name: str
    pid: int
    host: str = "here"
    local: bool = True
    given_up: bool = False
    ranks: int = 1
    actors: list[Any] = field(default_factory=list)
    fault: BaseException | None = None
    died: asyncio.Event = field(default_factory=asyncio.Event)
    going: asyncio.Event = field(default_factory=asyncio.Event)
    works: dict[asyncio.Future[Any], int] = field(default_factory=dict)  # to the rank
    lost: set[int] = field(default_factory=set)
    seen: Callable[[int], None] | None = None  # who watches it
    last_beat: float = field(default_factory=lambda: time.monotonic())
    progress: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.procs = self
        self.going.set()

    @property
    def actor(self) -> Any:
        """The only one, or that of rank 0."""
        return self.actors[0]

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(range(self.pid, self.pid + self.ranks))

    def spawn(self, name: str, actor: Callable[..., Any], *args: Any) -> Handle:
        try:
            self.actors = [actor(*args) for _ in range(self.ranks)]
        except Exception as error:
            self.fault = error
        return Handle(self)

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.last_beat

    async def beat(self) -> int:
        await asyncio.gather(*(self.reach(rank) for rank in range(self.ranks)))
        self.last_beat = time.monotonic()
        return self.ranks << 20

    async def reach(self, rank: int = 0) -> None:
        """Return when it can do something; raise what Monarch raises when it is dead."""
        stopped = asyncio.ensure_future(self.going.wait())
        dead = asyncio.ensure_future(self.died.wait())
        try:
            await asyncio.wait({stopped, dead}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            dead.cancel()
        if self.died.is_set() or rank in self.lost:
            raise SupervisionError(f"a call failed:\n\n  process {self.pid + rank} has exited")
        if self.fault is not None:
            raise SupervisionError(f"a call failed:\n\n  {self.fault!r}")

    def watch(self, ended: Callable[[int], None]) -> None:
        self.seen = ended
        self.show()

    def show(self) -> None:
        """Call who watches it, where it has ended."""
        if self.seen is not None and (pid := self.ended_pid()):
            asyncio.get_running_loop().call_soon(self.seen, pid)
            self.seen = None

    def ended_pid(self) -> int:
        if self.died.is_set():
            return self.pid
        return self.pid + min(self.lost) if self.lost else 0

    def die(self) -> None:
        self.died.set()
        for work in self.works:
            work.cancel()
        self.show()

    def lose(self, rank: int) -> None:
        self.lost.add(rank)
        for work in [work for work, at in self.works.items() if at == rank]:
            work.cancel()
        self.show()

    def ended(self, work: asyncio.Future[Any]) -> None:
        del self.works[work]
        if not work.cancelled():
            work.exception()  # its caller may be gone

    def stop(self) -> None:
        self.going.clear()

    def go_on(self) -> None:
        self.going.set()


class Handle:
    """A handle of the actor: `handle.method.choose(...)`, as Monarch's."""

    def __init__(self, process: FakeProcess, rank: int = 0) -> None:
        self._process, self._rank = process, rank

    def slice(self, procs: int) -> Handle:
        return Handle(self._process, procs)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(choose=lambda *args: self._call(method, args))

    async def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        process = self._process
        args = tuple(arg.value if isinstance(arg, Packed) else arg for arg in args)
        await process.reach(self._rank)
        # Work goes on when its caller goes away, and ends with its process.
        work = asyncio.ensure_future(getattr(process.actors[self._rank], method)(*args))
        process.works[work] = self._rank
        work.add_done_callback(process.ended)
        await asyncio.wait({work})
        await process.reach(self._rank)
        if work.exception() is not None:
            raise ActorError(work.exception())
        return work.result()


class FakeProcesses:
    """`services.pool.process_manager.Processes` without any. A process takes `start_s` to start;
    `fails` are
    the errors of the next starts, `left` are those whose host is being left, `ranks` where the
    hosts of others come in their role's order, `gpus` the devices of each start."""

    def __init__(self, start_s: float = 0.1) -> None:
        self.start_s = start_s
        self.living: list[FakeProcess] = []
        self.fails: list[Exception] = []
        self.started = 0
        self.left: list[FakeProcess] = []
        self.ranks: dict[FakeProcess, int] = {}
        self.gpus: list[tuple[int, ...]] = []
        self._closed = False

    async def take(
        self,
        name: str,
        threads: int,
        gpus: Sequence[int] = (),
        away_from: FakeProcess | None = None,
        role: str = "any",
        ranks: int = 1,
    ) -> FakeProcess:
        if self._closed:
            raise RunError("the mesh is stopping: it starts no process")
        await asyncio.sleep(self.start_s)
        if self.fails:
            raise self.fails.pop(0)
        self.started += 1
        self.gpus.append(tuple(gpus))
        process = FakeProcess(f"{name}x{self.started}", 100 + self.started, ranks=ranks)
        self.living.append(process)
        return process

    def leaving(self) -> Sequence[FakeProcess]:
        return [p for p in self.living if p in self.left]

    def rank(self, process: FakeProcess) -> int:
        return self.ranks.get(process, 0)

    def lack(self, role: str) -> str:
        return f"1 worker takes {role}: 0 full, 0 silent"

    def keep_spares(self) -> None:
        pass

    async def discard(self, process: FakeProcess) -> None:
        process.seen = None
        process.die()
        if process in self.living:  # a replica that dies while it drains is ended by both
            self.living.remove(process)

    async def stop(self) -> None:
        self._closed = True
        for process in self.living:
            process.die()
        self.living.clear()

    def lost(self, process: FakeProcess) -> None:
        pass

    def mind(self) -> None:
        pass

    def crowded(self) -> Sequence[FakeProcess]:
        return ()  # there is one host


@dataclass(eq=False)
class FakeHost:
    """A Monarch host mesh, as far as `services.pool.process_manager.Processes` uses one. While it
    is `down` nothing that starts there comes up."""

    start_s: float = 0.1
    down: bool = False
    started: list[str] = field(default_factory=list)

    def spawn_procs(self, *, name: str, **_: Any) -> Any:
        self.started.append(name)

        async def beat() -> Heartbeat:
            await asyncio.sleep(1e6 if self.down else self.start_s)
            return Heartbeat(0, 0)

        async def stop() -> None:
            await asyncio.sleep(self.start_s)

        pulse = SimpleNamespace(beat=SimpleNamespace(call_one=beat))
        return SimpleNamespace(spawn=lambda *_: pulse, stop=stop)


@dataclass
class House:
    """A real service over fake processes, and what it noted and observed."""

    service: Service
    processes: FakeProcesses
    notes: list[tuple[str, dict[str, Any]]]
    spans: list[TraceSpan]


def house(
    health: HealthSpec = HEALTH,
    start_s: float = 0.1,
    call_timeout_s: float = 60.0,
    spawn_timeout_s: float = 120.0,
) -> House:
    notes: list[tuple[str, dict[str, Any]]] = []
    spans: list[TraceSpan] = []
    processes = FakeProcesses(start_s)
    service = Service(
        processes,  # type: ignore[arg-type]
        health,
        call_timeout_s,
        spawn_timeout_s,
        lambda event, **facts: notes.append((event, facts)),
        spans.append,
    )
    return House(service, processes, notes, spans)


def healthy(pool: Pool, slot: int, actor: Any) -> Replica:
    """A replica in service, without a service around it."""
    process = FakeProcess(f"{pool.role}{slot}", 100 + slot, actors=[actor])
    replica = Replica(pool.role, slot, life=refitted(HealthState()))
    replica.process = process  # type: ignore[assignment]
    replica.actor = Handle(process)
    pool.replicas.append(replica)
    pool.changed()
    return replica


def pool_of(
    *actors: Any,
    timeout_s: float = 10.0,
    observe: Callable[[TraceSpan], None] = lambda span: None,
    role: str = "generator",
    **spec: Any,
) -> Pool:
    """A pool of these actors, all in service. A death is the end of its replica."""
    pool = Pool(role, RoleSpec(**{"replicas": max(1, len(actors)), **spec}), timeout_s, observe)
    pool.report_death = lambda replica, why: (replica.end(why), pool.changed())  # type: ignore[func-returns-value,assignment]
    for slot, actor in enumerate(actors):
        healthy(pool, slot, actor)
    return pool
