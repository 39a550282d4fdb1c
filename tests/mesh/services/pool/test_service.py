"""A service over real processes: whatever is killed or stopped, every request is answered once."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from monarch.actor import Actor, concurrent_endpoint, this_host

from cartridge_forge.actors.heartbeat import resident_bytes
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.protocols.spec.services import AutoscaleSpec, HealthSpec
from cartridge_forge.services.pool.pool import Pool
from cartridge_forge.services.pool.service import Service
from cartridge_forge.services.proc_info import has_ended

# Between suspect and dead a busy machine has time to look.
HEALTH = HealthSpec(heartbeat_s=0.1, suspect_after_s=0.5, dead_after_s=8.0)
SETTLE = 60.0


class Echo(Actor):
    """Answers what it is asked, who it is, and the newest version it was told."""

    def __init__(self, start_seconds: float = 0.0) -> None:
        time.sleep(start_seconds)
        self.version = -1

    @concurrent_endpoint
    async def ready(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def load(self, version: int) -> None:
        assert version > self.version, "told twice, or out of order"
        self.version = version

    @concurrent_endpoint
    async def echo(self, item: Any, seconds: float = 0.0) -> tuple[Any, int, int]:
        if seconds:
            await asyncio.sleep(seconds)
        return item, os.getpid(), self.version

    @concurrent_endpoint
    async def refuse(self) -> None:
        raise ValueError("bad prompt")


class Broken(Echo):
    def __init__(self) -> None:
        raise ValueError("no such model")


class Plain(Actor):
    """Its `ready` is no endpoint: Monarch would never call it."""

    async def ready(self) -> int:
        return 1


class Unready(Actor):
    @concurrent_endpoint
    async def echo(self, item: Any) -> Any:
        return item


class Fragile(Echo):
    """Its process ends while it starts."""

    @concurrent_endpoint
    async def ready(self) -> int:
        os._exit(3)


def slow_imports() -> None:
    """What a spare does beforehand; a marker says that it is done in this process."""
    time.sleep(0.5)
    os.environ["FORGE_WARM"] = "1"


class Imports(Echo):
    """Knows whether that was done beforehand."""

    @concurrent_endpoint
    async def warm(self) -> bool:
        return "FORGE_WARM" in os.environ


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Service]:
    """A service, of which no process is left at the end."""
    before = set(children())
    service = await Service.of(this_host(), **{"health": HEALTH, **options})
    try:
        yield service
    finally:
        await service.stop()
        # A process that had not answered yet has no known id: Monarch ends it once it is up.
        await until(lambda: not set(children()) - before)
        assert not list(filter(is_ours, asyncio.all_tasks()))


def is_ours(task: asyncio.Task[Any]) -> bool:
    """Of Monarch's own, the stop of a process that died may take its time."""
    code = Path(task.get_coro().cr_code.co_filename)
    return code.is_relative_to(Path(__file__).parents[4] / "cartridge_forge" / "services")


def children() -> list[int]:
    """Live processes that descend from this one."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            parents[int(stat.parent.name)] = int(fields[1])

    def descends(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == os.getpid():
                return True
        return False

    return [pid for pid in parents if descends(pid)]


async def until(done: Callable[[], Any]) -> None:
    async with asyncio.timeout(SETTLE):
        while not done():  # noqa: ASYNC110  # of other processes there is no event
            await asyncio.sleep(0.02)


async def placed(pool: Pool, asked: Collection[str]) -> None:
    """Wait until each of these requests has a replica, or its answer."""
    flying = pool.in_flight
    await until(lambda: all(flying[name].replica for name in asked if name in flying))


def children_of(service: Service) -> list[int]:
    return [process.pid for process in service._processes._hosts[0].processes]


async def warmed(service: Service) -> int:
    """The process id of the one spare, once it is warm."""
    spares = service._processes._spares
    await until(lambda: len(spares) == 1 and next(iter(spares)).done())
    return next(iter(spares)).result().pid


def pids(pool: Pool) -> list[int]:
    return [r.pid for r in pool.status().replicas]


def states(pool: Pool) -> list[str]:
    return [str(r.state) for r in pool.replicas]


# -- one service, whose replicas die --------------------------------------------------------------


def test_replicas_that_are_killed_stopped_or_refuse() -> None:
    """One service for all of it: a start is dear, and what comes first must not break the rest."""

    async def scenario() -> None:
        notes: list[tuple[str, dict[str, Any]]] = []
        async with serving(note=lambda event, **f: notes.append((event, f))) as service:
            spec = RoleSpec(replicas=2, restarts=3)
            pool = service.spawn(Echo, spec=spec)
            other = service.spawn(Echo, n=1, role="other")
            await service.ready()
            assert len(set(pids(pool) + pids(other))) == 3
            await pool.update("cartridge", 7, "load", 7)

            await a_users_mistake(pool)
            await a_killed_replica(pool, notes)
            await a_stopped_replica_in_time(pool)
            await a_stopped_replica(pool)
            assert (await other.route("echo", "x"))[2] == -1, "pools share nothing but the hosts"
            assert other.status().restarts == 0

            await a_spent_budget(service, pool)
            assert (await other.route("echo", "x"))[0] == "x"
            # What is stopped as the service ends must not be left either.
            os.kill(pids(other)[0], signal.SIGSTOP)

    asyncio.run(scenario())


async def a_users_mistake(pool: Pool) -> None:
    before = pids(pool)
    for _ in range(4):
        with pytest.raises(ValueError, match="bad prompt") as caught:
            await pool.route("refuse")
        assert caught.value.__notes__[0].startswith("raised by echo[")
    await asyncio.sleep(0.3)
    assert (pids(pool), states(pool)) == (before, ["healthy", "healthy"])
    status = pool.status()
    assert (status.failures, status.retries, status.restarts) == (4, 0, 0)


async def a_killed_replica(pool: Pool, notes: list[tuple[str, dict[str, Any]]]) -> None:
    first, second = pids(pool)
    asked = [asyncio.create_task(pool.route("echo", i, 1.0)) for i in range(10)]
    await until(lambda: len(pool.in_flight) == 10)
    await placed(pool, list(pool.in_flight))
    os.kill(first, signal.SIGKILL)
    answers = await asyncio.gather(*asked)
    assert [a[0] for a in answers] == list(range(10))
    assert first not in {a[1] for a in answers}
    await pool.settled(SETTLE)
    assert pids(pool)[1] == second
    new = pids(pool)[0]
    assert new not in (first, second)
    # Asked at once: the first that it answers carries the current version.
    firsts = [await pool.route("echo", i) for i in range(4)]
    assert {(pid, version) for _, pid, version in firsts} == {(new, 7), (second, 7)}
    assert [(event, f["replica"]) for event, f in notes] == [
        ("replica_lost", "echo[0]"), ("replica_back", "echo[0]"),
    ]  # fmt: skip
    assert notes[1][1]["seconds"] > 0
    assert pool.status().retries == 5, "each request of the dead one was tried once more"


async def a_stopped_replica_in_time(pool: Pool) -> None:
    before = pids(pool)
    os.kill(before[0], signal.SIGSTOP)
    try:
        await until(lambda: states(pool) == ["suspect", "healthy"])
        await pool.update("cartridge", 8, "load", 8)
        assert {(await pool.route("echo", i))[1] for i in range(3)} == {before[1]}
    finally:
        os.kill(before[0], signal.SIGCONT)
    await until(lambda: states(pool) == ["healthy", "healthy"])
    answers = [await pool.route("echo", i) for i in range(4)]
    assert {(pid, version) for _, pid, version in answers} == {(pid, 8) for pid in before}
    assert pool.status().restarts == 1


async def a_stopped_replica(pool: Pool) -> None:
    before = pids(pool)
    asked = [asyncio.create_task(pool.route("echo", i, 0.2)) for i in range(6)]
    await asyncio.sleep(0.05)
    os.kill(before[1], signal.SIGSTOP)
    answers = await asyncio.gather(*asked)
    assert [a[0] for a in answers] == list(range(6))
    await pool.settled(SETTLE)
    assert pids(pool)[0] == before[0]
    await until(lambda: has_ended(before[1]))
    assert pool.status().restarts == 2


async def a_spent_budget(service: Service, pool: Pool) -> None:
    for restarts in (3, 4):
        assert not service.failure.done()
        os.kill(pids(pool)[0], signal.SIGKILL)
        await until(lambda n=restarts: pool.status().restarts == n)
        if restarts == 3:
            await pool.settled(SETTLE)
    await asyncio.wait({service.failure}, timeout=SETTLE)
    with pytest.raises(
        RunError,
        match=r"^echo\[0\] died, and roles\.echo\.restarts \(3\) are used up; the last reason: .",
    ):
        service.failure.result()
    assert len(await pool.route("echo", 1)) == 3, "who is left still answers"


@pytest.mark.parametrize(
    ("actor", "message"),
    [
        (Broken, r"^broken\[0\] does not start: .*no such model"),
        (Fragile, r"^fragile\[0\] died, and roles\.fragile\.restarts \(2\) are used up; "),
    ],
)
def test_an_actor_that_cannot_start_is_said_at_once(actor: type[Echo], message: str) -> None:
    async def scenario() -> None:
        async with serving() as service:
            service.spawn(actor, spec=RoleSpec(restarts=2))
            with pytest.raises(RunError, match=message):
                await service.ready()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("actor", "message"),
    [
        (Broken, r"^broken\[0\] does not start: .*no such model"),
        (Fragile, r"^fragile\[0\] died, and roles\.fragile\.restarts \(2\) are used up; "),
    ],
)
def test_who_waits_for_a_pool_or_asks_it_hears_why_it_does_not_start(
    actor: type[Echo], message: str
) -> None:
    async def scenario() -> None:
        async with serving() as service:
            pool = service.spawn(actor, spec=RoleSpec(restarts=2))
            # No limit of this test ends either wait: each has an hour.
            asked = asyncio.create_task(pool.route("echo", 1, timeout_s=3600.0))
            with pytest.raises(RunError, match=message):
                await pool.settled(3600.0)
            with pytest.raises(RunError, match=f"^echo found no {actor.__name__.lower()}: "):
                await asked

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("actor", "n", "message"),
    [
        (Unready, 1, r"^Unready has no endpoint `ready`; add one, which returns once the actor "),
        (Plain, 1, r"^Plain\.ready is no endpoint; decorate it with `@endpoint`, which returns "),
        (Echo, 0, r"^echo cannot have 0 replicas; give n=1 or more$"),
        (Echo, -2, r"^echo cannot have -2 replicas; give n=1 or more$"),
    ],
)
def test_a_pool_that_nothing_could_wait_for_starts_nothing(
    actor: type[Actor], n: int, message: str
) -> None:
    async def scenario() -> None:
        async with serving() as service:
            with pytest.raises(RunError, match=message):
                service.spawn(actor, n=n)
            assert service.pools == {}
            assert children_of(service) == []

    asyncio.run(scenario())


# -- sizes --------------------------------------------------------------------------------------


def test_a_pool_refuses_to_have_no_replica_and_goes_on() -> None:
    async def scenario() -> None:
        async with serving() as service:
            pool = service.spawn(Echo, n=1)
            await pool.settled(SETTLE)
            for size in (0, -1):
                refusal = f"^echo cannot be scaled to {size} replicas; a pool has one at least"
                with pytest.raises(RunError, match=refusal):
                    pool.scale(size)
                with pytest.raises(RunError, match=refusal):
                    await service.scale("echo", size)
            assert (await pool.route("echo", 3))[0] == 3
            assert (pool.target, states(pool)) == (1, ["healthy"])

    asyncio.run(scenario())


def test_scaled_under_load_every_request_is_answered_once() -> None:
    async def scenario() -> None:
        async with serving() as service:
            pool = service.spawn(Echo, n=1)
            await service.ready()
            answers: Counter[int] = Counter()
            who: set[int] = set()
            going = True

            async def one(item: int) -> None:
                answered, pid, _ = await pool.route("echo", item, 0.02)
                answers[answered] += 1
                who.add(pid)

            async def load() -> int:
                asked = []
                while going:
                    asked.append(asyncio.create_task(one(len(asked))))
                    await asyncio.sleep(0.004)
                await asyncio.gather(*asked)
                return len(asked)

            loading = asyncio.create_task(load())
            pool.scale(8)
            await pool.settled(SETTLE)
            assert len(set(pids(pool))) == 8
            who.clear()
            await until(lambda: who == set(pids(pool)))  # all eight work

            # One that is to go still has a long request, and ends it.
            before = set(pool.in_flight)
            long = [asyncio.create_task(pool.route("echo", "long", 1.5)) for _ in range(8)]
            await asyncio.sleep(0)
            await placed(pool, set(pool.in_flight) - before)
            pool.scale(2)
            assert Counter(states(pool)) == {"healthy": 2, "draining": 6}
            leaving = pids(pool)[2:]
            await pool.settled(SETTLE)
            assert {pid for _, pid, _ in await asyncio.gather(*long)} & set(leaving)
            await until(lambda: all(map(has_ended, leaving)))

            # Down again before those that were asked for have started.
            pool.scale(4)
            await asyncio.sleep(0.03)
            pool.scale(2)
            await pool.settled(SETTLE)
            going = False
            asked = await loading
            assert answers == Counter(range(asked))
            assert asked > 100
            assert (pool.status().failures, pool.status().restarts) == (0, 0)
            await until(lambda: sorted(children_of(service)) == sorted(pids(pool)))

    asyncio.run(scenario())


def test_a_pool_follows_its_load() -> None:
    async def scenario() -> None:
        notes: list[tuple[str, dict[str, Any]]] = []
        async with serving(note=lambda event, **f: notes.append((event, f))) as service:
            limits = AutoscaleSpec(min=1, max=3, target_ongoing=2, up_delay_s=0.3, down_delay_s=0.6)
            pool = service.spawn(Echo, spec=RoleSpec(replicas=1, autoscale=limits))
            await service.ready()
            asked = [asyncio.create_task(pool.route("echo", i, 2.0)) for i in range(5)]
            await until(lambda: len(pool) == 3)
            await pool.settled(SETTLE)
            await asyncio.gather(*asked)
            await until(lambda: pool.target == 1)
            await pool.settled(SETTLE)
            sizes = [(f["before"], f["replicas"], f["by"]) for e, f in notes if e == "scaled"]
            assert sizes[0] == (1, 3, "load")
            assert sizes[-1][1:] == (1, "load")

    asyncio.run(scenario())


def test_a_spare_takes_the_place_and_is_replaced() -> None:
    async def scenario() -> None:
        async with serving(spares=1, warm=slow_imports) as service:
            pool = service.spawn(Imports, n=1)
            await service.ready()
            assert not await pool.route("warm")
            assert children_of(service) == pids(pool), "spares wait until they are asked for"
            service.keep_spares()
            spare = await warmed(service)
            os.kill(pids(pool)[0], signal.SIGKILL)
            await until(lambda: pids(pool) == [spare])
            await pool.settled(SETTLE)
            assert await pool.route("warm")
            # There is a spare again, and one that was killed meanwhile is passed over.
            os.kill(await warmed(service), signal.SIGKILL)
            os.kill(pids(pool)[0], signal.SIGKILL)
            await until(lambda: pool.status().restarts == 2)
            await pool.settled(SETTLE)
            assert (await pool.route("echo", 5))[0] == 5

    asyncio.run(scenario())


def test_stopped_while_it_starts_nothing_is_left() -> None:
    async def scenario() -> None:
        async with serving(spares=2, warm=slow_imports) as service:
            service.keep_spares()
            service.spawn(
                Echo, n=4, args=(5.0,)
            )  # on both spares, once they are warm, and two more
            await asyncio.sleep(0.1)

    asyncio.run(scenario())


# -- what it costs ------------------------------------------------------------------------------


def test_routing_costs_less_than_half_a_millisecond_and_leaks_nothing() -> None:
    async def scenario() -> None:
        async with serving() as service:
            pool = service.spawn(Echo, n=1)
            await service.ready()
            bare = pool.replicas[0].actor.echo

            async def entered(ask: Callable[[int], Any]) -> int:
                """How many Python functions 100 calls enter."""
                events: Counter[str] = Counter()
                sys.setprofile(lambda frame, event, of: events.update((event,)))
                try:
                    for i in range(100):
                        await ask(i)
                finally:
                    sys.setprofile(None)
                return events["call"]

            more = [
                await entered(lambda i: pool.route("echo", i)) - await entered(bare.call_one)
                for _ in range(3)
            ]
            assert min(more) <= 200 * 100, f"entered over a bare call: {more}"

            async def calls(count: int) -> None:
                for first in range(0, count, 8):
                    asked = (pool.route("echo", i) for i in range(first, first + 8))
                    await asyncio.gather(*asked)

            await calls(1000)
            gc.collect()
            tasks, blocks = len(asyncio.all_tasks()), sys.getallocatedblocks()
            memory, there = resident_bytes(os.getpid()), pool.replicas[0].memory_bytes
            await calls(4_000)
            await asyncio.sleep(0.3)
            gc.collect()
            assert pool.in_flight == {}
            assert not pool.replicas[0].calls
            assert len(asyncio.all_tasks()) <= tasks + 2, "heartbeats alone come and go"
            assert sys.getallocatedblocks() - blocks < 2_000, "half an object a call"
            # Monarch itself keeps 1.2 KB of every call, of a bare one too.
            assert resident_bytes(os.getpid()) - memory < 12 << 20
            assert pool.replicas[0].memory_bytes - there < 12 << 20
            assert pool.status().requests == 5_300

    asyncio.run(scenario())
