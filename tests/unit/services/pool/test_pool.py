"""Pools: who gets a request, how it ends whoever dies, and who is told what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_mesh import HEALTH, healthy, pool_of, run
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.protocols.errors import (
    ForgeError,
    PlaneError,
    PublishError,
    RunError,
    StaleTokenError,
)
from cartridge_forge.protocols.ports import TraceSpan
from cartridge_forge.protocols.records.status import PoolStatus, ReplicaState, ReplicaStatus
from cartridge_forge.protocols.step import TimedReply
from cartridge_forge.services.pool.health import silent
from cartridge_forge.services.pool.pool import Pool, Replica, gather


class Actor:
    """Answers its name and the request; `seconds` long. Writes down what it was told."""

    def __init__(self, name: str = "a", error: Exception | None = None) -> None:
        self.name = name
        self.error = error
        self.asked: list[Any] = []
        self.told: list[Any] = []

    async def work(self, item: Any = None, seconds: float = 0.0) -> Any:
        self.asked.append(item)
        await asyncio.sleep(seconds)
        if self.error is not None:
            raise self.error
        return self.name, item

    async def load(self, value: Any, seconds: float = 0.0) -> None:
        await asyncio.sleep(seconds)
        if self.error is not None:
            raise self.error
        self.told.append(value)

    async def compute(self, seconds: float) -> TimedReply:
        return TimedReply(seconds)


def doubt(replica: Replica, silent_s: float = 3.0) -> None:
    replica.life = silent(replica.life, silent_s, HEALTH)


def test_a_pool_keeps_when_models_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies arrive at 10, 11 and 12; other replies say nothing of models."""
    ticks = iter([10.0, 11.0, 12.0])

    async def scenario() -> Pool:
        pool = pool_of(Actor("a"), Actor("b"))
        clock = SimpleNamespace(perf_counter=lambda: next(ticks), monotonic=time.monotonic)
        monkeypatch.setattr("cartridge_forge.services.pool.pool.time", clock)
        await pool.route("work")
        await pool.route("compute", 4.0)
        await pool.fanout("compute", 0.5)
        return pool

    assert list(run(scenario()).worked) == [(6.0, 10.0), (10.5, 11.0), (11.5, 12.0)]


# -- routing ------------------------------------------------------------------------------------


def test_the_least_loaded_gets_the_next() -> None:
    async def scenario() -> None:
        a, b, c = actors = [Actor(n) for n in "abc"]
        pool = pool_of(*actors)
        long = asyncio.create_task(pool.route("work", 0, 5.0))
        await asyncio.sleep(0)
        for item in (1, 2, 3, 4):
            assert (await pool.route("work", item))[1] == item
        assert [actor.asked for actor in (a, b, c)] == [[0], [1, 3], [2, 4]]
        assert await long == ("a", 0)

    run(scenario())


def test_as_many_as_a_replica_takes_and_the_others_wait_in_turn() -> None:
    async def scenario() -> None:
        pool = pool_of(Actor("a"), Actor("b"), max_ongoing=2)
        begun = time.monotonic()
        ended: list[tuple[int, float]] = []

        async def one(item: int) -> None:
            await pool.route("work", item, 1.0)
            ended.append((item, time.monotonic() - begun))

        asked = [asyncio.create_task(one(i)) for i in range(6)]
        await asyncio.sleep(0.5)
        assert [r.ongoing for r in pool.replicas] == [2, 2]
        assert pool.status().waiting == 2
        await asyncio.gather(*asked)
        assert [seconds for _, seconds in sorted(ended)] == [1.0] * 4 + [2.0] * 2

    run(scenario())


def test_nobody_but_the_healthy_is_asked() -> None:
    async def scenario() -> None:
        actors = [Actor(n) for n in "abcd"]
        pool = pool_of(*actors)
        dead, doubted, draining, _ = pool.replicas
        dead.end("killed")
        doubt(doubted)
        draining.life = type(draining.life)(ReplicaState.DRAINING)
        assert [(await pool.route("work", i))[0] for i in range(3)] == ["d"] * 3
        assert await pool.fanout("work", 7) == [("d", 7)]

    run(scenario())


def test_a_session_stays_with_its_replica_while_that_serves() -> None:
    async def scenario() -> None:
        actors = [Actor(n) for n in "abc"]
        pool = pool_of(*actors, router="session")
        sessions = {name: pool.session(name) for name in ("u1", "u2", "u3", "u4")}
        first = {name: (await ask("work"))[0] for name, ask in sessions.items()}
        assert len(set(first.values())) > 1, "these sessions tell nothing"
        for name, ask in sessions.items():
            assert [(await ask("work"))[0] for _ in range(3)] == [first[name]] * 3
        gone = "abc".index(first["u1"])
        pool.replicas[gone].end("killed")
        moved = {name: (await ask("work"))[0] for name, ask in sessions.items()}
        for name in sessions:
            assert (moved[name] == first[name]) == (first[name] != first["u1"])
        pool.replicas.pop(gone)
        healthy(pool, gone, Actor("new"))
        assert (await sessions["u1"]("work"))[0] == "new", "its slot's successor has it again"

    run(scenario())


# -- deadlines ----------------------------------------------------------------------------------


def test_silence_ends_and_names_everything() -> None:
    async def scenario() -> None:
        pool = pool_of(Actor(), Actor(), role="doc_teacher")
        doubt(pool.replicas[1])
        begun = time.monotonic()
        with pytest.raises(RunError) as caught:
            await pool.route("work", 1, 99.0, timeout_s=2.5)
        assert time.monotonic() - begun == pytest.approx(2.5)
        assert str(caught.value) == (
            "doc_teacher[0].work did not answer within 2.5 s (request doc_teacher/1, attempt 1; "
            "replicas: doc_teacher[0] healthy, doc_teacher[1] suspect); raise call_timeout_s in "
            "the mesh file if the work is really that long"
        )
        assert pool.replicas[0].state is ReplicaState.HEALTHY
        assert pool.in_flight == {}
        assert not pool.replicas[0].calls
        assert pool.replicas[0].ongoing == 0

    run(scenario())


def test_no_replica_until_the_deadline() -> None:
    async def scenario() -> None:
        pool = pool_of(timeout_s=3.0)
        begun = time.monotonic()
        with pytest.raises(RunError) as caught:
            await pool.route("work")
        assert time.monotonic() - begun == pytest.approx(3.0)
        assert str(caught.value).startswith(
            "generator.work found no replica within 3 s (request generator/1, attempt 1; replicas: "
            "none); raise call_timeout_s"
        )

    run(scenario())


def test_a_replica_that_comes_in_time_is_taken() -> None:
    async def scenario() -> None:
        pool = pool_of()
        asked = asyncio.create_task(pool.route("work", 4))
        await asyncio.sleep(1.0)
        assert pool.status().waiting == 1
        healthy(pool, 0, Actor("late"))
        assert await asked == ("late", 4)

    run(scenario())


def test_the_deadline_holds_over_all_attempts() -> None:
    async def scenario() -> None:
        pool = pool_of(Actor(), Actor())
        asked = asyncio.create_task(pool.route("work", 1, 99.0, timeout_s=2.0))
        begun = time.monotonic()
        await asyncio.sleep(1.5)
        next(r for r in pool.replicas if r.ongoing).process.die()
        with pytest.raises(RunError, match=r"within 2 s \(request generator/1, attempt 2;"):
            await asked
        assert time.monotonic() - begun == pytest.approx(2.0)

    run(scenario())


def test_a_closed_pool_keeps_nobody_waiting() -> None:
    async def scenario() -> None:
        pool = pool_of(Actor(), timeout_s=60.0, max_ongoing=1)
        asked = [asyncio.create_task(pool.route("work", i, 50.0)) for i in range(2)]
        await asyncio.sleep(1.0)
        begun = time.monotonic()
        pool.close("the service was stopped")
        for task in asked:
            with pytest.raises(RunError, match=r"^work found no generator: the service was stop"):
                await task
        with pytest.raises(RunError, match="the service was stopped"):
            await pool.route("work")
        assert time.monotonic() == begun

    run(scenario())


# -- errors and deaths --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad prompt"),
        KeyError("kv"),
        TimeoutError("its own"),
        StaleTokenError("tokens of version 3"),
        PublishError("used twice"),
    ],
)
def test_what_an_actor_raises_is_the_callers_alone(error: Exception) -> None:
    async def scenario() -> None:
        pool = pool_of(Actor(error=error), Actor(error=error))
        with pytest.raises(type(error)) as caught:
            await pool.route("work", 1)
        assert caught.value is error
        assert error.__notes__ == ["raised by generator[0].work"]
        assert [r.state for r in pool.replicas] == [ReplicaState.HEALTHY] * 2
        status = pool.status()
        assert (status.requests, status.failures, status.retries) == (0, 1, 0)
        assert len(pool.replicas[0].process.actor.asked) == 1, "it is not tried again"

    run(scenario())


def test_a_request_survives_the_replica_that_worked_on_it() -> None:
    async def scenario() -> None:
        spans: list[TraceSpan] = []
        actors = [Actor(n) for n in "abc"]
        pool = pool_of(*actors, observe=spans.append)
        pool.replicas[1].told["cartridge"] = 7
        asked = asyncio.create_task(pool.route("work", 9, 2.0))
        await asyncio.sleep(1.0)
        pool.replicas[0].process.die()
        assert await asked == ("b", 9)
        assert [a.asked for a in actors] == [[9], [9], []]
        status = pool.status()
        assert (status.requests, status.failures, status.retries) == (1, 0, 1)
        assert [r.state for r in pool.replicas] == ["dead", "healthy", "healthy"]
        assert [(s.lane, s.name, dict(s.facts, waited=0)) for s in spans] == [
            (
                "generator[0]", "work",
                {"request": "generator/1", "attempt": 1, "outcome": "lost", "waited": 0,
                 "version": -1},
            ),
            (
                "generator[1]", "work",
                {"request": "generator/1", "attempt": 2, "outcome": "ok", "waited": 0,
                 "version": 7},
            ),
        ]  # fmt: skip

    run(scenario())


def test_one_answer_even_when_it_comes_with_the_death() -> None:
    """The answer is there, and the same turn brings the replica's end: it is not asked again."""

    async def scenario() -> None:
        actors = [Actor("a"), Actor("b")]
        pool = pool_of(*actors)
        reply = asyncio.get_running_loop().create_future()
        endpoint = SimpleNamespace(choose=lambda *_: reply)  # Monarch's calls are futures
        pool.replicas[0].actor = SimpleNamespace(work=endpoint)
        asked = asyncio.create_task(pool.route("work", 1))
        await asyncio.sleep(0.5)
        reply.set_result(("a", 1))
        pool.replicas[0].end("killed")
        assert await asked == ("a", 1)
        assert actors[1].asked == []
        assert pool.status().retries == 0

    run(scenario())


def test_a_replica_may_be_ended_again_while_its_calls_are_cancelled() -> None:
    async def scenario() -> None:
        pool = pool_of(Actor("a"), Actor("b"))
        asked = asyncio.create_task(pool.route("work", 1, 1.0))
        await asyncio.sleep(0.5)
        for _ in range(3):  # a turn each
            pool.replicas[0].end("killed")
            await asyncio.sleep(0)
        assert await asked == ("b", 1)

    run(scenario())


def test_a_request_that_kills_every_replica_gives_up() -> None:
    async def scenario() -> None:
        pool = pool_of(*[Actor() for _ in range(5)], attempts=3)
        for replica in pool.replicas:
            replica.process.die()
        with pytest.raises(RunError) as caught:
            await pool.route("work", 1)
        assert str(caught.value) == (
            "generator.work was lost 3 times with the replica that worked on it, last: process 102 "
            "has exited; if the replicas are well, raise roles.generator.attempts"
        )
        states = [r.state for r in pool.replicas]
        assert states == ["dead"] * 3 + ["healthy"] * 2, "two were not even asked"
        assert (pool.failures, pool.retries) == (1, 2)

    run(scenario())


def test_a_caller_that_goes_away_gives_its_seat_back() -> None:
    async def scenario() -> None:
        pool = pool_of(Actor(), max_ongoing=1)
        working = asyncio.create_task(pool.route("work", 1, 99.0, timeout_s=500))
        await asyncio.sleep(1.0)
        waiting = asyncio.create_task(pool.route("work", 2, timeout_s=500))
        begun = time.monotonic()
        await asyncio.sleep(1.0)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert await waiting == ("a", 2)
        assert time.monotonic() - begun == pytest.approx(1.0)
        assert (pool.in_flight, pool.replicas[0].ongoing) == ({}, 0)
        pool.replicas[0].ongoing = 1
        waiting = asyncio.create_task(pool.route("work", 3, timeout_s=500))
        await asyncio.sleep(1.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert pool.in_flight == {}

    run(scenario())


# -- fan-out and shares -------------------------------------------------------------------------


def test_a_fanout_asks_all_at_once_and_answers_in_their_order() -> None:
    async def scenario() -> None:
        pool = pool_of(*[Actor(n) for n in "abc"])
        begun = time.monotonic()
        assert await pool.fanout("work", 1, 2.0) == [("a", 1), ("b", 1), ("c", 1)]
        assert time.monotonic() - begun == pytest.approx(2.0)

    run(scenario())


def test_a_fanout_in_which_one_dies_waits_for_the_others() -> None:
    async def scenario() -> None:
        actors = [Actor("a"), Actor("b")]
        pool = pool_of(*actors)
        telling = asyncio.create_task(pool.fanout("load", "x", 2.0))
        await asyncio.sleep(1.0)
        pool.replicas[0].process.die()
        with pytest.raises(RunError, match=r"^generator\[0\]\.load failed: process 100 has exited"):
            await telling
        assert actors[1].told == ["x"]

    run(scenario())


@given(
    target=st.integers(1, 7),
    alive=st.integers(1, 7),
    items=st.lists(st.integers(), max_size=20),
    delays=st.lists(st.integers(0, 5), min_size=7, max_size=7),
)
def test_shares_depend_on_the_target_alone(
    target: int, alive: int, items: list[int], delays: list[int]
) -> None:
    async def scenario() -> None:
        pool = Pool("generator", pool_of(replicas=target).spec, 10.0)
        for slot in range(alive):
            healthy(pool, slot, Actor(str(slot)))
        shares: list[list[int]] = []

        async def work(share: Sequence[int]) -> list[Any]:
            shares.append(list(share))
            await asyncio.sleep(delays[len(shares) - 1])  # they answer in any order
            return [f"answer {item}" for item in share]

        assert await pool.split(items, work) == [f"answer {item}" for item in items]
        assert shares == [items[i::target] for i in range(min(target, len(items)))]

    run(scenario())


def test_gather_raises_the_first_failure_after_all_have_ended() -> None:
    async def scenario() -> list[str]:
        ended: list[str] = []

        async def end(name: str, seconds: float, error: Exception | None) -> str:
            await asyncio.sleep(seconds)
            ended.append(name)
            if error:
                raise error
            return name

        calls = [
            end("well", 3, None),
            end("second", 6, RunError("the first by place")),
            end("third", 0, KeyError("the first by time")),
            end("last", 9, None),
        ]
        with pytest.raises(RunError, match=r"^the first by place$"):
            await gather(calls)
        assert await gather([]) == []
        return ended

    assert run(scenario()) == ["third", "well", "second", "last"]


# -- updates ------------------------------------------------------------------------------------


def test_all_are_told_and_no_one_twice() -> None:
    async def scenario() -> None:
        actors = [Actor(), Actor()]
        pool = pool_of(*actors)
        await pool.update("cartridge", 1, "load", "v1")
        await pool.update("cartridge", 1, "load", "v1 elsewhere")
        await pool.update("cartridge", 2, "load", "v2")
        assert [a.told for a in actors] == [["v1", "v2"]] * 2
        assert [r.version for r in pool.replicas] == [2, 2]
        late = healthy(pool, 2, Actor())
        assert pool.missed(late)
        await pool.catch_up(late)
        assert not pool.missed(late)
        assert late.process.actor.told == ["v2"]

    run(scenario())


def test_who_comes_later_is_told_what_is_kept_in_order() -> None:
    async def scenario() -> None:
        pool = pool_of()
        for version in (1, 2, 4, 3):
            await pool.update("cartridge", version, "load", f"v{version}", keep=2)
        late = healthy(pool, 0, Actor())
        await pool.catch_up(late)
        assert late.process.actor.told == ["v3", "v4"]
        assert late.told == {"cartridge": 4}

    run(scenario())


def test_a_version_told_again_replaces_what_is_remembered_of_it() -> None:
    async def scenario() -> None:
        pool = pool_of()
        await pool.update("cartridge", 1, "load", "v1", keep=2)
        await pool.update("cartridge", 2, "load", "v2", keep=2)
        await pool.update("cartridge", 1, "load", "v1 elsewhere", keep=2)
        late = healthy(pool, 0, Actor())
        await pool.catch_up(late)
        assert late.process.actor.told == ["v1 elsewhere", "v2"]

    run(scenario())


def test_the_topic_that_changed_last_is_told_last() -> None:
    async def scenario() -> None:
        pool = pool_of()
        await pool.update("plane", 0, "load", "plane 0")
        await pool.update("cartridge", 5, "load", "v5 on plane 0")
        first = healthy(pool, 0, Actor())
        await pool.catch_up(first)
        first.end("killed")
        await pool.update("plane", 1, "load", "plane 1")
        await pool.update("cartridge", 5, "load", "v5 on plane 1")
        second = healthy(pool, 0, Actor())
        await pool.catch_up(second)
        assert first.process.actor.told == ["plane 0", "v5 on plane 0"]
        assert second.process.actor.told == ["plane 1", "v5 on plane 1"]

    run(scenario())


def test_one_that_is_silent_or_dies_keeps_nobody_from_an_update() -> None:
    async def scenario() -> None:
        actors = [Actor(n) for n in "abc"]
        pool = pool_of(*actors)
        _, stopped, dying = pool.replicas
        stopped.process.stop()
        asyncio.get_running_loop().call_later(1.0, doubt, stopped)
        asyncio.get_running_loop().call_later(0.5, dying.process.die)
        begun = time.monotonic()
        await pool.update("cartridge", 3, "load", "v3", 0.7)
        assert time.monotonic() - begun == pytest.approx(1.0, abs=0.3)
        assert [r.version for r in pool.replicas] == [3, -1, -1]
        assert dying.state is ReplicaState.DEAD
        # Doubted already, nobody waits for it a second time.
        begun = time.monotonic()
        await pool.update("cartridge", 4, "load", "v4")
        assert time.monotonic() == begun
        stopped.process.go_on()
        await pool.catch_up(stopped)  # may return without, while it is doubted
        await asyncio.sleep(1.0)
        await pool.catch_up(stopped)
        assert actors[1].told == ["v3", "v4"], "what it was being told is not told twice"
        assert not pool.missed(stopped)
        assert actors[0].told == ["v3", "v4"]

    run(scenario())


def test_an_update_that_is_refused_or_takes_too_long_fails_and_may_be_told_again() -> None:
    async def scenario() -> None:
        actor = Actor(error=PlaneError("no such key"))
        pool = pool_of(actor)
        with pytest.raises(PlaneError, match="no such key") as caught:
            await pool.update("cartridge", 1, "load", "v1")
        assert caught.value.__notes__ == ["raised by generator[0].load"]
        assert pool.replicas[0].state is ReplicaState.HEALTHY
        actor.error = None
        await pool.update("cartridge", 1, "load", "v1 again")
        assert actor.told == ["v1 again"]
        with pytest.raises(ForgeError) as slow:
            await pool.update("cartridge", 2, "load", "v2", 99.0)
        assert str(slow.value) == (
            "generator[0].load did not answer within 10 s; raise call_timeout_s in the mesh file "
            "if the work is really that long"
        )

    run(scenario())


def test_an_update_that_comes_while_another_is_told_is_told_after_it() -> None:
    async def scenario() -> None:
        actor = Actor()
        pool = pool_of(actor)
        first = asyncio.create_task(pool.update("cartridge", 1, "load", "v1", 2.0, keep=2))
        await asyncio.sleep(1.0)
        await pool.update("cartridge", 2, "load", "v2", 1.0, keep=2)
        assert actor.told == ["v1", "v2"]
        assert first.done()

    run(scenario())


# -- what is shown ------------------------------------------------------------------------------


def test_the_status_counts() -> None:
    async def scenario() -> None:
        actors = [Actor(), Actor(error=ValueError("no"))]
        pool = pool_of(*actors, max_ongoing=1)
        pool.replicas[0].memory_bytes = 4096
        await pool.route("work", 1)
        with pytest.raises(ValueError, match="no"):
            await pool.route("work", 2)
        actors[1].error = None
        await pool.update("cartridge", 6, "load", "v6")
        asked = [asyncio.create_task(pool.route("work", i, 1.0)) for i in range(3)]
        await asyncio.sleep(0.5)
        doubt(pool.replicas[1])
        assert pool.status() == PoolStatus(
            "generator", 2, 1,
            (
                ReplicaStatus("generator[0]", ReplicaState.HEALTHY, "here", 100, 1, 6, 4096),
                ReplicaStatus("generator[1]", ReplicaState.SUSPECT, "here", 101, 1, 6, 0),
            ),
            requests=1, failures=1, retries=0, restarts=0,
        )  # fmt: skip
        assert sorted(r.replica for r in pool.in_flight.values()) == [
            "", "generator[0]", "generator[1]",
        ]  # fmt: skip
        await asyncio.gather(*asked)
        assert pool.status().requests == 4

    run(scenario())


def test_a_span_says_how_it_ended_and_how_long_it_waited() -> None:
    spans: list[TraceSpan] = []

    async def scenario() -> None:
        pool = pool_of(Actor(), observe=spans.append, max_ongoing=1, timeout_s=4.0)
        await asyncio.gather(pool.route("work", 1, 1.5), pool.route("work", 2, 0.5))
        with pytest.raises(RunError):
            await pool.route("work", 3, 99.0)
        pool.replicas[0].process.actor.error = ValueError("no")
        with pytest.raises(ValueError, match="no"):
            await pool.route("work", 4)
        with pytest.raises(ValueError, match="no"):
            await pool.update("cartridge", 1, "load", "x")

    run(scenario())
    seen = [
        (s.name, round(s.end - s.begin, 3), s.facts.get("waited"), s.facts["outcome"])
        for s in spans
    ]
    assert seen == [
        ("work", 1.5, 0, "ok"),
        ("work", 0.5, 1.5, "ok"),
        ("work", 4.0, 0, "timeout"),
        ("work", 0.0, 0, "failed"),
        ("load", 0.0, None, "failed"),
    ]


@pytest.mark.parametrize("replicas", [0, -1])
def test_a_pool_is_never_scaled_to_nothing(replicas: int) -> None:
    pool = pool_of(Actor(), replicas=2)
    with pytest.raises(RunError, match=f"cannot be scaled to {replicas} replicas; a pool has one"):
        pool.scale(replicas)
    assert pool.target == 2


def test_settled_waits_for_the_starting_and_the_leaving() -> None:
    async def scenario() -> None:
        pool = pool_of(Actor(), replicas=2)
        with pytest.raises(TimeoutError):
            await pool.settled(1.0)
        waiting = asyncio.create_task(pool.settled(5.0))
        await asyncio.sleep(0.5)
        healthy(pool, 1, Actor())
        extra = healthy(pool, 2, Actor())
        await asyncio.sleep(0.5)
        assert not waiting.done()
        pool.forget(extra)
        await waiting

    run(scenario())


@pytest.mark.parametrize(
    ("most", "shares"),
    [
        (None, [[0, 2, 4, 6], [1, 3, 5]]),
        (4, [[0, 2, 4, 6], [1, 3, 5]]),
        (3, [[0, 3, 6], [1, 4], [2, 5]]),
        (1, [[0], [1], [2], [3], [4], [5], [6]]),
    ],
)
def test_shares_are_no_larger_than_asked(most: int | None, shares: list[list[int]]) -> None:
    async def scenario() -> None:
        pool = Pool("generator", pool_of(replicas=2).spec, 10.0)
        seen: list[list[int]] = []

        async def work(share: Sequence[int]) -> list[Any]:
            seen.append(list(share))
            return list(share)

        assert await pool.split(range(7), work, most) == list(range(7))
        assert seen == shares
        assert await pool.split([], work, most) == []

    run(scenario())
