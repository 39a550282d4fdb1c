"""Test calls of replicas that die, that move, and their limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fake_mesh import House, house, run
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.protocols.errors import EngineDied, EngineKilledError, RunError
from cartridge_forge.protocols.records.status import ReplicaState
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.protocols.spec.services import AutoscaleSpec, HealthSpec
from cartridge_forge.services.pool.health import HealthState, drained, lost, refitted, silent
from cartridge_forge.services.pool.hosts import HostWorker
from cartridge_forge.services.pool.pool import CallLimits, Pool, Replica

DEAD, DRAINING = ReplicaState.DEAD, ReplicaState.DRAINING
HEALTHY, SUSPECT = ReplicaState.HEALTHY, ReplicaState.SUSPECT
SPEC = HealthSpec(heartbeat_s=0.5, suspect_after_s=2.0, dead_after_s=15.0)
STARTING, GONE = HealthState(), HealthState(DEAD, over=True)


@pytest.mark.parametrize(
    ("seconds", "state"),
    [
        (0.0, HEALTHY), (1.999, HEALTHY), (2.0, SUSPECT), (14.999, SUSPECT), (15.0, DEAD),
        (1e9, DEAD),
    ],
)  # fmt: skip
def test_silence_is_judged(seconds: float, state: ReplicaState) -> None:
    assert silent(HealthState(HEALTHY), seconds, SPEC).state is state


def test_a_starting_process_works_only_after_its_refit() -> None:
    assert STARTING.state is DEAD
    for early in (0.0, 3.0, 100.0):  # neither its heartbeats nor its silence while it starts
        assert silent(STARTING, early, SPEC) == STARTING
    assert refitted(STARTING) == HealthState(HEALTHY)


def test_a_doubted_replica_returns_on_a_heartbeat() -> None:
    doubted = silent(HealthState(HEALTHY), 2.0, SPEC)
    assert doubted == HealthState(SUSPECT)
    assert refitted(doubted) == doubted, "a refit proves nothing about its silence"
    assert silent(doubted, 0.0, SPEC) == HealthState(HEALTHY)


def test_what_was_given_up_stays_dead() -> None:
    """A process that was stopped, replaced, and then goes on: its late heartbeat counts nothing."""
    given_up = silent(HealthState(SUSPECT), 15.0, SPEC)
    assert given_up == GONE
    assert refitted(GONE) == silent(GONE, 0.0, SPEC) == drained(GONE) == lost(GONE) == GONE


@pytest.mark.parametrize(
    "before", [STARTING, HealthState(HEALTHY), HealthState(SUSPECT), HealthState(DRAINING)]
)
def test_draining_ends_and_never_returns(before: HealthState) -> None:
    draining = drained(before)
    assert draining == HealthState(DRAINING)
    assert refitted(draining) == silent(draining, 0.0, SPEC) == silent(draining, 9.0, SPEC)
    assert silent(draining, 9.0, SPEC) == draining
    assert silent(draining, 15.0, SPEC) == GONE  # what it had must be given to another


moves = st.one_of(
    st.just("refit"), st.just("drain"), st.just("lost"), st.floats(0, 30, allow_nan=False)
)
# Every change that the drawing in protocols/records/status.py allows, with what brings it about.
LEGAL = {
    (STARTING, HealthState(HEALTHY)): "refit",
    (HealthState(HEALTHY), HealthState(SUSPECT)): "silence",
    (HealthState(SUSPECT), HealthState(HEALTHY)): "silence",
    (STARTING, HealthState(DRAINING)): "drain",
    (HealthState(HEALTHY), HealthState(DRAINING)): "drain",
    (HealthState(SUSPECT), HealthState(DRAINING)): "drain",
    (STARTING, GONE): "lost",
    (HealthState(HEALTHY), GONE): "silence or lost",
    (HealthState(SUSPECT), GONE): "silence or lost",
    (HealthState(DRAINING), GONE): "silence or lost",
}


@given(st.lists(moves, max_size=30))
def test_no_order_of_events_leaves_the_drawing(happened: list[str | float]) -> None:
    life, refits, drains, ended = HealthState(), 0, False, False
    for move in happened:
        before = life
        if isinstance(move, float):
            life, cause = silent(life, move, SPEC), "silence"
        else:
            cause = move
            life = {"refit": refitted, "drain": drained, "lost": lost}[move](life)
        refits += cause == "refit"
        drains |= cause == "drain"
        if life != before:
            assert cause in LEGAL[before, life]
        ended |= life == GONE
        # Requests go only where a refit came before, no drain and no end did, and it was just
        # heard of.
        if life.takes_requests:
            assert refits
            assert not drains
            assert not ended
            assert not isinstance(move, float) or move < 2.0
        if cause == "lost":
            assert life == GONE


FAR = 3600.0


async def ended(limits: CallLimits, seconds: float) -> float:
    """Return when a call that nothing answers ended, in seconds of the loop's clock."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as limit:
            limits.add(limit, loop.time() + seconds)
            try:
                await asyncio.Event().wait()
            finally:
                limits.discard(limit)
    except TimeoutError:
        return loop.time()
    raise AssertionError("nothing ended it")


def test_each_call_ends_at_its_own_deadline_and_not_before() -> None:
    async def run() -> None:
        limits, begun = CallLimits(), asyncio.get_running_loop().time()
        given = (0.12, 0.04, 0.2, 0.04)  # a later call may have an earlier deadline
        calls = [asyncio.create_task(ended(limits, seconds)) for seconds in given]
        slow = asyncio.create_task(ended(limits, FAR))
        async with asyncio.timeout(30):
            for call, seconds in zip(calls, given, strict=True):
                assert await call >= begun + seconds
        order = sorted(range(4), key=lambda i: calls[i].result())
        assert sorted(order[:2]) == [1, 3]
        assert order[2:] == [0, 2]
        assert not slow.done()
        assert len(limits) == 1
        limits.end()
        async with asyncio.timeout(30):
            await slow
        assert not limits

    asyncio.run(run())


def test_a_call_that_was_answered_leaves_the_others_their_deadlines() -> None:
    async def run() -> None:
        limits, loop = CallLimits(), asyncio.get_running_loop()
        async with asyncio.timeout(None) as limit:
            limits.add(limit, loop.time() + 0.02)
            await asyncio.sleep(0)
            limits.discard(limit)
        async with asyncio.timeout(30):
            await ended(limits, 0.05)
        async with asyncio.timeout(30):
            await ended(limits, 0.01)

    asyncio.run(run())


LATE = 0.3


class Batching:
    """Works on all of its requests together. Its engine dies 0.1 s after "poison" has come: a pass
    over that one, and those "beside" it, has failed. "late" ones are told so later than others,
    "mute" ones never."""

    def __init__(self) -> None:
        self.died = asyncio.Event()

    async def ready(self) -> int:
        return 1

    async def work(self, item: str, seconds: float = 1.0) -> str:
        if "poison" in item:
            await asyncio.sleep(0.1)
            self.died.set()
        try:
            async with asyncio.timeout(seconds):
                await self.died.wait()
        except TimeoutError:
            return item
        if "late" in item:
            await asyncio.sleep(LATE)
        if "mute" in item:
            await asyncio.sleep(1e6)
        raise EngineDied("the engine died: no memory", suspect="poison" in item or "beside" in item)


async def settled(h: House, **spec: Any) -> Pool:
    pool = h.service.spawn(Batching, role="worker", spec=RoleSpec(**spec))
    await h.service.ready()
    return pool


async def healthy_counts(pool: Pool, counts: set[int]) -> None:
    while True:
        counts.add(sum(r.life.takes_requests for r in pool.replicas))
        await asyncio.sleep(0.01)


def names(h: House) -> list[str]:
    return [name for name, _ in h.notes]


@pytest.mark.parametrize("poison", ["poison", "late poison"])
def test_a_request_that_kills_engines_is_failed_after_the_second(poison: str) -> None:
    """All others are answered, and one replica serves throughout: the request is not tried on the
    last one that does. No budget of restarts is needed for it."""

    async def scenario() -> None:
        h = house()
        pool = await settled(h, replicas=2, restarts=0)
        counts: set[int] = set()
        counting = asyncio.create_task(healthy_counts(pool, counts))
        others = [f"other {i}" for i in range(4)] + ["beside 1", "beside 2"]
        asked = [asyncio.create_task(pool.route("work", item)) for item in others]
        with pytest.raises(EngineKilledError) as killed:
            await pool.route("work", poison)
        assert str(killed.value) == (
            "worker.work is not tried again: 2 engines in turn died in a step that was over it, "
            "last: the engine died: no memory; send something shorter or simpler, or look for the "
            "cause in the log of the replicas"
        )
        assert await asyncio.gather(*asked) == others
        assert await pool.route("work", "other 4") == "other 4"
        await pool.settled(5.0)
        counting.cancel()
        assert counts == {1, 2}
        assert names(h) == ["replica_lost", "replica_back"] * 2
        assert {f["cause"] for name, f in h.notes if name == "replica_lost"} == {"engine"}
        status = pool.status()
        assert (status.engine_deaths, status.restarts, status.failures) == (2, 2, 1)
        assert not h.service.failure.done()
        await h.service.stop()

    run(scenario())


def test_the_only_replica_is_tried_twice() -> None:
    async def scenario() -> None:
        h = house()
        pool = await settled(h, replicas=1, restarts=0)
        other = asyncio.create_task(pool.route("work", "other"))
        with pytest.raises(EngineKilledError):
            await pool.route("work", "poison")
        assert await other == "other"
        assert pool.status().engine_deaths == 2
        await h.service.stop()

    run(scenario())


def test_a_request_outside_the_step_that_failed_is_no_suspect() -> None:
    """It sees three engines die, of others' doing, and is answered by the fourth."""

    async def scenario() -> None:
        h = house()
        pool = await settled(h, replicas=1, restarts=0)
        other = asyncio.create_task(pool.route("work", "other", 2.0))
        killed = await asyncio.gather(
            *(pool.route("work", f"poison {i}") for i in range(2)), return_exceptions=True
        )
        assert [type(error) for error in killed] == [EngineKilledError] * 2
        assert await other == "other"
        assert pool.status().engine_deaths == 3  # of both, then of each alone
        await h.service.stop()

    run(scenario())


def test_a_reply_that_does_not_come_is_not_waited_for() -> None:
    """A process without memory may not even tell that its engine died."""

    async def scenario() -> None:
        h = house()
        pool = await settled(h, replicas=2)
        asked = [asyncio.create_task(pool.route("work", f"mute {i}")) for i in range(3)]
        with pytest.raises(EngineKilledError):
            await pool.route("work", "poison")
        async with asyncio.timeout(10):
            assert await asyncio.gather(*asked) == ["mute 0", "mute 1", "mute 2"]
        await h.service.stop()

    run(scenario())


def test_a_process_that_dies_is_still_counted() -> None:
    async def scenario() -> None:
        h = house()
        pool = await settled(h, replicas=1, restarts=0)
        asked = asyncio.create_task(pool.route("work", "other"))
        await asyncio.sleep(0.1)
        pool.replicas[0].process.die()  # type: ignore[union-attr]
        with pytest.raises(RunError, match=r"roles.worker.restarts \(0\) are used up"):
            await asked
        assert [f["cause"] for name, f in h.notes if name == "replica_lost"] == ["process"]
        assert pool.status().engine_deaths == 0
        await h.service.stop()

    run(scenario())


class Clerk:
    async def ready(self) -> int:
        return 1

    async def work(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"


class Source:
    """Takes what is wanted, or `refuses` it."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.wanted: list[tuple[str, int]] = []

    async def workers(self) -> AsyncGenerator[tuple[HostWorker, ...]]:
        yield ()

    async def want(self, role: str, replicas: int) -> None:
        self.wanted.append((role, replicas))
        if self.refuses:
            raise RunError(self.refuses)

    def lacking(self) -> tuple[str, ...]:
        return ()

    async def close(self) -> None: ...


async def moves_settled(h: House, n: int = 2, prepare: Any = None, **spec: Any) -> Pool:
    pool = h.service.spawn(Clerk, role="clerk", spec=RoleSpec(replicas=n, **spec), prepare=prepare)
    await h.service.ready()
    return pool


def test_replicas_of_a_host_that_is_left_end_their_work_and_start_elsewhere() -> None:
    async def scenario() -> None:
        h = house()
        pool = await moves_settled(h)
        leaving = pool.replicas[0].process
        asked = [asyncio.create_task(pool.route("work", 3.0)) for _ in range(2)]
        await asyncio.sleep(0.1)
        h.processes.left.append(leaving)  # type: ignore[arg-type]
        await asyncio.sleep(1.5)
        states = [(r.slot, r.generation, r.state.value) for r in pool.replicas]
        assert states == [(0, 0, "draining"), (0, 1, "healthy"), (1, 0, "healthy")]
        assert await asyncio.gather(*asked) == ["done", "done"]
        await pool.settled(5.0)
        assert leaving not in h.processes.living
        assert [e for e, _ in h.notes] == ["replica_moved"]
        status = pool.status()
        assert (status.restarts, status.retries, status.failures) == (0, 0, 0)
        await h.service.stop()

    run(scenario())


def test_one_that_takes_up_where_another_left_off_waits_for_its_end() -> None:
    async def scenario() -> None:
        h = house()
        prepared: list[tuple[int, float]] = []

        async def prepare(replica: Replica) -> None:
            prepared.append((replica.generation, time.monotonic()))

        pool = await moves_settled(h, n=1, prepare=prepare)
        asked = asyncio.create_task(pool.route("work", 4.0))
        await asyncio.sleep(0.1)
        h.processes.left.append(pool.replicas[0].process)  # type: ignore[arg-type]
        await asyncio.sleep(1.0)
        later = asyncio.create_task(pool.route("work", 0.5))
        assert await asked == "done"
        ended = time.monotonic()
        assert await later == "done"
        assert [generation for generation, _ in prepared] == [0, 1]
        assert prepared[1][1] >= ended
        assert len(h.processes.living) == 1
        await h.service.stop()

    run(scenario())


def test_one_that_dies_while_its_host_is_left_costs_no_restart() -> None:
    async def scenario() -> None:
        h = house()
        pool = await moves_settled(h, n=1)
        asked = asyncio.create_task(pool.route("work", 9.0))
        await asyncio.sleep(0.1)
        process: Any = pool.replicas[0].process
        h.processes.left.append(process)
        await asyncio.sleep(1.0)
        process.die()
        assert await asked == "done"
        await pool.settled(5.0)
        assert (pool.status().restarts, pool.status().retries) == (0, 1)
        await h.service.stop()

    run(scenario())


def test_growing_asks_for_hosts_first() -> None:
    async def scenario() -> None:
        h, source = house(), Source()
        h.service._source = source
        pool = await moves_settled(h)
        await h.service.scale("clerk", 3)
        assert (source.wanted, pool.target) == ([("clerk", 3)], 3)
        source.refuses = "no rights; grant them"
        with pytest.raises(RunError, match="no rights; grant them"):
            await h.service.scale("clerk", 4)
        assert (pool.target, len(pool.replicas)) == (3, 3)
        await h.service.stop()

    run(scenario())


def test_shrinking_drains_the_last_hosts_first_and_then_gives_them_back() -> None:
    async def scenario() -> None:
        h, source = house(), Source()
        h.service._source = source
        pool = await moves_settled(h, n=3)
        for rank, slot in enumerate((1, 2, 0)):
            h.processes.ranks[pool.replicas[slot].process] = rank  # type: ignore[index]
        asked = [asyncio.create_task(pool.route("work", 5.0)) for _ in range(3)]
        await asyncio.sleep(0.1)
        await h.service.scale("clerk", 1)
        assert [r.slot for r in pool.replicas if r.state is ReplicaState.HEALTHY] == [1]
        await asyncio.sleep(4.0)
        assert source.wanted == [], "they still work"
        await asyncio.gather(*asked)
        await asyncio.sleep(2.0)
        assert source.wanted == [("clerk", 1)]
        await h.service.stop()

    run(scenario())


def test_a_source_that_never_answers_is_an_error_within_the_call() -> None:
    async def scenario() -> None:
        h, source = house(), Source()
        h.service._source = source
        await moves_settled(h)

        async def never(role: str, replicas: int) -> None:
            await asyncio.sleep(1e6)

        source.want = never  # type: ignore[method-assign]
        begun = time.monotonic()
        with pytest.raises(RunError, match="nobody answered within 8 s"):
            await h.service.scale("clerk", 4)
        assert time.monotonic() - begun == pytest.approx(8.0)
        await h.service.stop()

    run(scenario())


def test_a_scaling_by_load_that_is_refused_is_said_once() -> None:
    async def scenario() -> None:
        h, source = house(), Source("no rights; grant them")
        h.service._source = source
        limits = AutoscaleSpec(min=1, max=4, target_ongoing=1.0, up_delay_s=1.0)
        pool = await moves_settled(h, n=1, autoscale=limits)
        asked = [asyncio.create_task(pool.route("work", 50.0)) for _ in range(4)]
        await asyncio.sleep(45.0)
        assert [facts for event, facts in h.notes if event == "failed"] == [
            {"error": "scale", "message": "no rights; grant them"}
        ]
        assert source.wanted == [("clerk", 4)] * 2, "and tried again 30 s later"
        assert pool.target == 1
        await asyncio.gather(*asked)
        await h.service.stop()

    run(scenario())


def test_a_process_that_its_role_cannot_work_in_fails_the_start_and_costs_a_restart_later() -> None:
    async def scenario() -> None:
        h = house()
        wrong = ["on w1, /runs/a/spec.yaml is not there; mount it"]

        async def check(process: Any) -> None:
            if wrong:
                raise RunError(wrong[0])

        h.service.spawn(Clerk, role="early", check=check)
        with pytest.raises(RunError, match=r"^early\[0\] does not start: on w1, .*; mount it$"):
            await h.service.ready()
        await h.service.stop()

        h, wrong[:] = house(), []
        pool = h.service.spawn(Clerk, role="clerk", spec=RoleSpec(restarts=100), check=check)
        await h.service.ready()
        wrong.append("on w2, it is not there")
        process: Any = pool.replicas[0].process
        process.die()
        await asyncio.sleep(3.0)
        assert pool.status().restarts > 1
        wrong.clear()
        await pool.settled(5.0)
        assert not h.service.failure.done()
        await h.service.stop()

    run(scenario())
