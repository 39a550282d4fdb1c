"""The lives of replicas: a real service and real pools over processes that are none."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from fake_mesh import FakeProcess, house, run
from rooms.services.lifecycle_setup import Worker, settled

from cartridge_forge.protocols.errors import DataError, PlaneError, RunError
from cartridge_forge.protocols.records.status import ReplicaState
from cartridge_forge.protocols.spec.services import AutoscaleSpec
from cartridge_forge.services.pool.pool import Pool, Replica
from cartridge_forge.services.pool.service import UNHEARD


def pids(pool: Pool) -> list[int]:
    return [r.process.pid if r.process else 0 for r in pool.replicas]


def test_a_dead_replica_is_replaced_and_knows_the_current_version() -> None:
    async def scenario() -> None:
        h = house()
        pool = await settled(h)
        await pool.update("cartridge", 7, "load", 7)
        asked = [asyncio.create_task(pool.route("work", i, 3.0)) for i in range(4)]
        await asyncio.sleep(1.0)
        pool.replicas[0].process.die()
        assert await asyncio.gather(*asked) == [(i, 7) for i in range(4)]
        await pool.settled(5.0)
        assert pids(pool) == [103, 102]
        assert [r.generation for r in pool.replicas] == [1, 0]
        assert [(name, facts["role"], facts["replica"]) for name, facts in h.notes] == [
            ("replica_lost", "worker", "worker[0]"),
            ("replica_back", "worker", "worker[0]"),
        ]
        # Noticed by the next heartbeat, started in 0.1 s and told in 0.05 s.
        assert h.notes[1][1] == {
            "role": "worker", "replica": "worker[0]", "seconds": 0.15, "pid": 103,
        }  # fmt: skip
        assert pool.status().restarts == 1
        assert [p.pid for p in h.processes.living] == [102, 103]
        await h.service.stop()

    run(scenario())


@pytest.mark.parametrize(("every", "beats"), [(0.1, 5), (2.0, 15)])
def test_a_replica_that_replies_is_sent_few_heartbeats(every: float, beats: int) -> None:
    """10 s are 20 periods of 0.5 s. With replies in each, every fourth has a heartbeat; with one in
    every fourth, the others have."""

    async def scenario() -> None:
        h = house()
        pool = await settled(h, n=1)
        process = pool.replicas[0].process
        sent = mock.patch.object(process, "beat", wraps=process.beat)
        with sent as told:
            until = time.monotonic() + 10.0
            while time.monotonic() < until:
                await pool.route("work", 1, 0.0)
                await asyncio.sleep(every)
            assert told.call_count == pytest.approx(beats, abs=2)
            # Silence counts from the last reply.
            process.stop()
            await asyncio.sleep(2.6)
            assert pool.replicas[0].state is ReplicaState.SUSPECT
            process.go_on()
        await h.service.stop()

    run(scenario())


def test_supervision_is_faster_than_a_heartbeat() -> None:
    async def scenario() -> None:
        h = house()
        pool = await settled(h)
        first = pool.replicas[0]
        begun = time.monotonic()
        report = "MeshFailure(\n  worker0 failed:\n  the process was killed(sig=9)\n)"

        class Failure:
            mesh_name = f"{first.process.name}heartbeat-1x7a"

            def __str__(self) -> str:
                return report

        assert h.service.noticed(Failure())  # type: ignore[arg-type]
        await asyncio.sleep(0.2)
        await pool.settled(5.0)
        assert time.monotonic() - begun == pytest.approx(0.2)
        assert first.ended == "the process was killed(sig=9)"
        # Of an actor that is none of ours nothing follows, while its process lives.
        assert h.service.noticed(SimpleNamespace(mesh_name="logger-9"))  # type: ignore[arg-type]
        await asyncio.sleep(0.3)
        assert pool.status().restarts == 1
        await h.service.stop()

    run(scenario())


def test_a_silent_replica_is_doubted_then_replaced() -> None:
    async def scenario() -> None:
        h = house()  # doubted after 2 s, given up after 5
        pool = await settled(h)
        stopped = pool.replicas[0]
        stopped.process.stop()
        await asyncio.sleep(2.6)
        assert [r.state for r in pool.replicas] == ["suspect", "healthy"]
        assert [await pool.route("work", i, 0.0) for i in range(3)] == [(i, -1) for i in range(3)]
        await asyncio.sleep(2.9)
        await pool.settled(5.0)
        assert stopped.ended == "it was silent for 5 s"
        assert stopped.process.ended_pid(), "what is left of it is killed"
        assert pids(pool) == [103, 102]
        await h.service.stop()

    run(scenario())


def test_a_silent_replica_that_answers_again_is_told_what_it_missed() -> None:
    async def scenario() -> None:
        h = house()
        pool = await settled(h)
        stopped = pool.replicas[0]
        stopped.process.stop()
        await asyncio.sleep(2.6)
        await pool.update("cartridge", 3, "load", 3)
        stopped.process.go_on()
        while stopped.state != "healthy":
            assert stopped.version == -1
            await asyncio.sleep(0.01)
        assert stopped.version == 3
        assert stopped.process.actor.version == 3
        assert pool.status().restarts == 0
        await h.service.stop()

    run(scenario())


def test_what_a_replica_was_being_told_when_it_fell_silent_is_not_told_twice() -> None:
    async def scenario() -> None:
        h = house()
        pool = await settled(h)
        stopped = pool.replicas[0]
        updating = asyncio.create_task(pool.update("cartridge", 3, "load", 3))
        await asyncio.sleep(0.01)
        stopped.process.stop()
        await updating  # does not wait for it once it is doubted
        assert [r.version for r in pool.replicas] == [-1, 3]
        stopped.process.go_on()
        await asyncio.sleep(1.0)
        assert stopped.state == "healthy"
        assert stopped.process.actor.loads == [3]
        assert not h.service.failure.done()
        await h.service.stop()

    run(scenario())


class Picky(Worker):
    """Cannot be told version 3 the first time, for a reason that the test gives."""

    error: Exception = RunError("")

    async def load(self, version: int) -> None:
        if version == 3 and self.error is not None:
            raise self.error
        await super().load(version)


@pytest.mark.parametrize(
    ("error", "restarts"), [(PlaneError("no such key"), 0), (ValueError("cannot be"), 1)]
)
def test_one_that_cannot_be_told_what_it_missed_is_no_failure_of_the_service(
    monkeypatch: pytest.MonkeyPatch, error: Exception, restarts: int
) -> None:
    async def scenario() -> None:
        h = house()
        monkeypatch.setattr(Picky, "error", None)
        pool = h.service.spawn(Picky, n=2)
        await h.service.ready()
        stopped = pool.replicas[0]
        stopped.process.stop()
        await asyncio.sleep(2.6)
        await pool.update("cartridge", 3, "load", 3)
        stopped.process.actor.error = error
        stopped.process.go_on()
        await asyncio.sleep(2.0)
        stopped.process.actor.error = None
        await asyncio.sleep(1.0)
        await pool.settled(1.0)
        assert not h.service.failure.done()
        assert pool.status().restarts == restarts
        assert {r.version for r in pool.replicas} == {3}
        await h.service.stop()

    run(scenario())


def test_the_death_of_a_starting_replica_is_seen_whenever_it_comes() -> None:
    async def scenario() -> None:
        h = house()
        dying = 3

        async def prepare(replica: Replica) -> None:
            nonlocal dying
            await asyncio.sleep(0.7)
            if dying:
                dying -= 1
                replica.process.die()
                await asyncio.sleep(0.7)  # its death is noticed, and `prepare` ends well

        pool = h.service.spawn(Worker, n=1, prepare=prepare)
        await asyncio.sleep(10.0)
        await pool.settled(1.0)
        assert pool.status().restarts == 3
        assert len(h.processes.living) == 1
        await h.service.stop()

    run(scenario())


@pytest.mark.parametrize(
    "failed",
    ["{process}heartbeat-1x7a", "{actor}-1x7a"],
)
def test_a_process_given_up_while_it_starts_is_tried_again(failed: str) -> None:
    """On a machine that stands still for seconds Monarch takes a starting process for lost."""

    class Failure:
        def __init__(self, mesh_name: str) -> None:
            self.mesh_name = mesh_name

        def __str__(self) -> str:
            return f'MeshFailure(\n  {UNHEARD} while querying for "x". It likely crashed\n)'

    async def slow(replica: Replica) -> None:
        await asyncio.sleep(1.0)

    async def scenario() -> None:
        h = house()
        pool = h.service.spawn(Worker, n=1, prepare=slow)
        await asyncio.sleep(0.5)
        first = pool.replicas[0]
        name = failed.format(process=first.process.name, actor=first.actor_name)
        assert h.service.noticed(Failure(name))  # type: ignore[arg-type]
        await h.service.ready()
        assert pool.replicas[0].generation == 1
        assert pool.status().restarts == 1
        await h.service.stop()

    run(scenario())


def test_a_spent_budget_fails_with_role_and_reason() -> None:
    async def scenario() -> None:
        h = house()
        pool = await settled(h, restarts=2)
        for _ in range(2):
            pool.replicas[1].process.die()
            await asyncio.sleep(1.0)
            await pool.settled(1.0)
        assert not h.service.failure.done()
        pool.replicas[1].process.die()
        await asyncio.sleep(1.0)
        with pytest.raises(RunError) as caught:
            h.service.failure.result()
        assert str(caught.value) == (
            "worker[1] died, and roles.worker.restarts (2) are used up; the last reason: its "
            "process 104 has ended"
        )
        assert await pool.route("work", 1, 0.0) == (1, -1), "the others still answer"
        await h.service.stop()

    run(scenario())


class Broken(Worker):
    def __init__(self) -> None:
        raise ValueError("no such model")


class Mute(Worker):
    async def ready(self) -> int:
        await asyncio.Event().wait()
        return 1


class Misled(Worker):
    async def ready(self) -> int:
        raise DataError("the document is empty")


@pytest.mark.parametrize(
    ("actor", "error", "message", "after"),
    [
        # A second more: Monarch's word may come before that of a process's end.
        (Broken, RunError, r"^broken\[0\] does not start: ValueError\('no such model'\)$", 1.1),
        (Misled, DataError, r"^the document is empty\nraised by misled\[0\]\.ready$", 0.1),
        (
            Mute,
            RunError,
            r"^mute\[0\] does not start: it made no progress for 120 s; raise "
            r"spawn_timeout_s in the mesh file, or by --set spawn_timeout_s=240, if",
            120.1,
        ),
    ],
)
def test_an_actor_that_cannot_start(
    actor: type[Worker], error: type[Exception], message: str, after: float
) -> None:
    async def scenario() -> None:
        h = house()
        begun = time.monotonic()
        h.service.spawn(actor, n=1)
        with pytest.raises(error, match=message):
            await h.service.ready()
        assert time.monotonic() - begun == pytest.approx(after, abs=0.03)
        assert h.processes.started == 1, "a second try would end the same"
        await h.service.stop()
        assert h.processes.living == []

    run(scenario())


class Slow(Worker):
    """Prepares for as many periods as `periods`, with progress in each of the first `telling`."""

    periods, telling = 40, 40
    process: FakeProcess

    async def ready(self) -> int:
        for period in range(self.periods):
            await asyncio.sleep(4.0)
            if period < self.telling:
                self.process.progress = (period + 1, 0)
        return 1


@pytest.mark.parametrize("telling", [40, 3])
def test_a_start_goes_on_while_it_makes_progress(telling: int) -> None:
    """160 s under spawn_timeout_s 1, which counts from the last progress, and no sooner than a
    replica that is silent is given up: after 5 s."""

    async def scenario() -> None:
        h = house(spawn_timeout_s=1.0)
        pool = h.service.spawn(type("Slow", (Slow,), {"telling": telling}), n=1, role="slow")
        begun = time.monotonic()
        starting = asyncio.ensure_future(h.service.ready())
        await asyncio.sleep(0.2)
        process: Any = pool.replicas[0].process
        process.actor.process = process
        if telling == Slow.periods:
            await starting
            assert time.monotonic() - begun == pytest.approx(160.1, abs=0.1)
        else:
            with pytest.raises(
                RunError,
                match=r"^slow\[0\] does not start: it made no progress for "
                r"5 s; raise spawn_timeout_s in the mesh file, or by --set ",
            ):
                await starting
            # The last progress came after 12 s; it is looked for every 5 s.
            assert time.monotonic() - begun == pytest.approx(20.1, abs=0.1)
        await h.service.stop()

    run(scenario())


def test_monarch_may_tell_of_a_process_s_end_before_its_parent() -> None:
    """Supervision fails the start; 0.3 s later the process is seen to have ended, so it is replaced
    as one that was lost."""

    async def scenario() -> None:
        h = house()
        pool = h.service.spawn(Broken, n=1)
        await asyncio.sleep(0.5)
        first = pool.replicas[0]
        h.service._lifecycle.roles["broken"].actor = Worker
        await asyncio.sleep(0.3)
        assert not h.service.failure.done()
        first.process.die()
        await pool.settled(10.0)
        assert pool.status().restarts == 1
        await h.service.stop()

    run(scenario())


def test_a_successor_that_does_not_get_ready_has_a_reason() -> None:
    async def scenario() -> None:
        h = house()
        pool = await settled(h, n=1, restarts=1)
        h.service._lifecycle.roles["worker"].actor = Mute
        pool.replicas[0].process.die()
        await asyncio.sleep(125.0)
        with pytest.raises(RunError, match=r"reason: it made no progress for 120 s; raise spawn"):
            h.service.failure.result()
        await h.service.stop()

    run(scenario())


def test_starts_that_fail_one_after_another_are_tried_ever_later() -> None:
    """The second at once, then after 0.5, 1, 2, 4, 8 and 8 s: eight starts in 30 s, besides that
    of the first death."""

    async def scenario() -> None:
        h = house()
        pool = await settled(h, n=1)
        h.service._lifecycle.roles["worker"].actor = Broken
        pool.replicas[0].process.die()
        await asyncio.sleep(30.0)
        assert not h.service.failure.done()
        assert pool.status().restarts == 1 + 8
        h.service._lifecycle.roles["worker"].actor = Worker
        await pool.settled(10.0)
        await h.service.stop()

    run(scenario())


def test_starts_that_fail_for_hours_do_not_nest() -> None:
    """Each in the one before would be too deep for Python after some hundreds."""

    async def scenario() -> None:
        h = house()
        pool = await settled(h, n=1, restarts=10_000)
        h.service._lifecycle.roles["worker"].actor = Broken
        pool.replicas[0].process.die()
        await asyncio.sleep(2 * 3600.0)
        assert not h.service.failure.done()
        assert pool.status().restarts > 850
        await h.service.stop()

    run(scenario())


def test_a_host_that_starts_nothing_for_a_while_is_waited_for() -> None:
    async def scenario() -> None:
        h = house()
        pool = await settled(h)
        h.processes.fails = [RunError("host 0 started no process")] * 3
        pool.replicas[0].process.die()
        await asyncio.sleep(5.0)
        await pool.settled(1.0)
        assert pool.status().restarts == 4
        await h.service.stop()

    run(scenario())


def test_scaled_down_before_it_has_a_process() -> None:
    async def scenario() -> None:
        h = house(start_s=1.0)
        pool = await settled(h, n=1)
        pool.scale(4)
        await asyncio.sleep(0.5)
        pool.scale(1)
        await pool.settled(1.0)
        await asyncio.sleep(2.0)
        assert h.processes.started == 4
        assert [p.pid for p in h.processes.living] == pids(pool) == [101]
        assert not h.service.failure.done()
        await h.service.stop()

    run(scenario())


def test_scaled_down_while_it_gets_ready() -> None:
    async def scenario() -> None:
        h = house()
        pool = await settled(h, n=1)
        h.service._lifecycle.roles["worker"].actor = Mute
        pool.scale(2)
        await asyncio.sleep(0.5)
        assert len(h.processes.living) == 2
        pool.scale(1)
        await pool.settled(1.0)
        assert [p.pid for p in h.processes.living] == [101]
        await asyncio.sleep(130.0)
        assert not h.service.failure.done()
        assert pool.status().restarts == 0
        await h.service.stop()

    run(scenario())


def test_a_draining_replica_ends_what_it_has() -> None:
    async def scenario() -> None:
        h = house()
        pool = await settled(h)
        long = [asyncio.create_task(pool.route("work", i, 9.0)) for i in range(2)]
        await asyncio.sleep(0.5)
        pool.scale(1)
        assert [r.state for r in pool.replicas] == ["healthy", "draining"]
        assert [await pool.route("work", i, 0.0) for i in (7, 8)] == [(7, -1), (8, -1)]
        assert pool.replicas[1].ongoing == 1
        begun = time.monotonic()
        await pool.settled(20.0)
        assert time.monotonic() - begun == pytest.approx(8.5, abs=0.1)
        assert await asyncio.gather(*long) == [(0, -1), (1, -1)]
        assert len(h.processes.living) == 1
        await h.service.stop()

    run(scenario())


def test_scaled_up_again_while_one_drains_and_dies() -> None:
    """The dead one is still there, for a moment: it must not be counted as one that stays."""

    async def scenario() -> None:
        h = house()
        pool = await settled(h)
        asked = [asyncio.create_task(pool.route("work", i, 9.0)) for i in range(2)]
        await asyncio.sleep(0.5)
        pool.scale(1)
        dying = pool.replicas[1]
        dying.process.die()
        for _ in range(10):  # turns in which its request learns of it
            if not dying.ended:
                await asyncio.sleep(0)
        assert dying.ended
        assert dying in pool.replicas, "it is gone already: this test shows nothing"
        pool.scale(2)
        await asyncio.gather(*asked)
        await pool.settled(5.0)
        assert len(h.processes.living) == 2
        await h.service.stop()

    run(scenario())


def test_a_pool_follows_its_load() -> None:
    async def scenario() -> None:
        h = house()
        pool = await settled(
            h, n=1,
            autoscale=AutoscaleSpec(min=1, max=4, target_ongoing=2, up_delay_s=2, down_delay_s=4),
        )  # fmt: skip
        asked = [asyncio.create_task(pool.route("work", i, 12.0)) for i in range(6)]
        await asyncio.sleep(1.0)
        assert pool.target == 1
        await asyncio.sleep(3.0)
        assert (pool.target, len(h.processes.living)) == (3, 3)
        await asyncio.gather(*asked)
        await asyncio.sleep(6.0)
        await pool.settled(1.0)
        assert (pool.target, len(h.processes.living)) == (1, 1)
        scalings = [facts for name, facts in h.notes if name == "scaled"]
        assert [(f["before"], f["replicas"], f["by"]) for f in scalings] == [
            (1, 3, "load"), (3, 1, "load"),
        ]  # fmt: skip
        await h.service.stop()

    run(scenario())


def test_stop_ends_what_is_in_flight_and_what_starts() -> None:
    async def scenario() -> None:
        h = house(start_s=1.0)
        pool = await settled(h)
        asked = asyncio.create_task(pool.route("work", 1, 99.0))
        pool.scale(5)
        await asyncio.sleep(0.5)
        begun = time.monotonic()
        await h.service.stop()
        with pytest.raises(RunError, match="found no worker: the service was stopped"):
            await asked
        assert time.monotonic() - begun < 0.1
        assert h.processes.living == []
        await asyncio.sleep(5.0)
        assert h.processes.living == []
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    run(scenario())
