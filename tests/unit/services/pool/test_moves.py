"""Hosts that are left, and pools that are scaled over hosts of their own: the service's part."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fake_mesh import House, house, run

from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.records.status import ReplicaState
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.protocols.spec.services import AutoscaleSpec
from cartridge_forge.services.pool.hosts import HostWorker
from cartridge_forge.services.pool.pool import Pool, Replica


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


async def settled(h: House, n: int = 2, prepare: Any = None, **spec: Any) -> Pool:
    pool = h.service.spawn(Clerk, role="clerk", spec=RoleSpec(replicas=n, **spec), prepare=prepare)
    await h.service.ready()
    return pool


def test_replicas_of_a_host_that_is_left_end_their_work_and_start_elsewhere() -> None:
    async def scenario() -> None:
        h = house()
        pool = await settled(h)
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

        pool = await settled(h, n=1, prepare=prepare)
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
        pool = await settled(h, n=1)
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
        pool = await settled(h)
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
        pool = await settled(h, n=3)
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
        await settled(h)

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
        pool = await settled(h, n=1, autoscale=limits)
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
