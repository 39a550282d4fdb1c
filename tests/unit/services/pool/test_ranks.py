"""Replicas of several ranks: asked as one, answered for by rank 0, lost and replaced as one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_mesh import House, house, run

from cartridge_forge.actors.heartbeat import Heartbeat
from cartridge_forge.protocols.errors import PlaneError, RanksLostError, RunError
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.protocols.step import Preparation
from cartridge_forge.services.pool import process as process_module
from cartridge_forge.services.pool.pool import Pool
from cartridge_forge.services.pool.process import ReplicaProcess


class Rank:
    """What a rank does is told to it as one function for each rank."""

    count = 0

    def __init__(self) -> None:
        self.rank, Rank.count = Rank.count % 3, Rank.count + 1
        self.heard: list[Any] = []

    async def ready(self) -> int:
        return self.rank

    async def load(self, version: int) -> int:
        self.heard.append(version)
        return self.rank

    async def step(self, *works: Callable[[], Any]) -> Any:
        self.heard.append("step")
        done = works[self.rank]()
        return await done if asyncio.iscoroutine(done) else done


def fails(error: Exception, after_s: float = 0.0) -> Callable[[], Any]:
    async def work() -> None:
        await asyncio.sleep(after_s)
        raise error

    return work


async def three(h: House, **spec: Any) -> Pool:
    Rank.count = 0
    pool = h.service.spawn(Rank, role="trainer", spec=RoleSpec(procs=3, threads=2, **spec))
    await h.service.ready()
    return pool


def actors(pool: Pool) -> list[Any]:
    process: Any = pool.replicas[0].process
    return list(process.actors)


def test_every_rank_is_asked_and_rank_0_answers() -> None:
    async def scenario() -> None:
        h = house()
        pool = await three(h)
        works = [lambda: "first", lambda: asyncio.sleep(3.0), lambda: "third"]
        begun = asyncio.get_running_loop().time()
        assert await pool.route("step", *works) == "first"
        assert asyncio.get_running_loop().time() - begun >= 3.0, "the slowest is waited for"
        await pool.update("cartridge", 4, "load", 4)
        assert [a.heard for a in actors(pool)] == [["step", 4]] * 3
        status = pool.status().replicas[0]
        assert (status.pid, status.memory_bytes) == (101, 3 << 20)
        assert len(pool) == 1
        await h.service.stop()

    run(scenario())


OWN = ValueError("rank 1 is out of memory")
OTHERS = RanksLostError("trainer rank 0 of 3 lost the others")


@pytest.mark.parametrize("last", [0.0, 2.0])
def test_a_rank_s_own_error_is_the_call_s_whatever_the_others_say(last: float) -> None:
    """Those that lost it may say so first. Nobody died: the replica stays, as of one process."""

    async def scenario() -> None:
        h = house()
        pool = await three(h)
        before = pool.replicas[0]
        with pytest.raises(ValueError, match="rank 1 is out of memory") as caught:
            await pool.route("step", fails(OTHERS), fails(OWN, last), fails(OTHERS))
        assert "raised by trainer[0] rank 1.step" in caught.value.__notes__
        assert pool.replicas == [before]
        await h.service.stop()

    run(scenario())


def test_what_all_refuse_is_the_call_s_error() -> None:
    async def scenario() -> None:
        h = house()
        pool = await three(h)
        with pytest.raises(PlaneError, match="no tensor scores/3"):
            await pool.route("step", *[fails(PlaneError("no tensor scores/3"))] * 3)
        assert pool.restarts == 0
        await h.service.stop()

    run(scenario())


def test_ranks_that_lost_one_another_are_all_replaced_and_told_what_they_missed() -> None:
    """As when one was silent for longer than they wait: every process is well."""

    async def scenario() -> None:
        h = house()
        pool = await three(h)
        await pool.update("cartridge", 4, "load", 4)
        old = actors(pool)
        lost = [fails(OTHERS)] * 3

        def once() -> Any:
            return lost.pop()() if lost else "done"

        assert await pool.route("step", once, once, once) == "done"
        assert [r.generation for r in pool.replicas] == [1]
        assert not set(old) & set(actors(pool))
        assert [a.heard for a in actors(pool)] == [[4, "step"]] * 3
        assert h.notes[0][1]["reason"] == str(OTHERS)
        await h.service.stop()

    run(scenario())


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_with_any_rank_s_process_the_replica_is_gone(rank: int) -> None:
    async def scenario() -> None:
        h = house()
        pool = await three(h)
        process: Any = pool.replicas[0].process
        asked = asyncio.create_task(pool.route("step", *[lambda: asyncio.sleep(3.0, "ok")] * 3))
        await asyncio.sleep(1.0)
        process.lose(rank)
        assert await asked == "ok"
        assert process.ended_pid(), "the others are ended too"
        assert pool.replicas[0].generation == 1
        assert len(h.processes.living) == 1
        # Idle, it is seen by the next heartbeat.
        h.processes.living[0].lose(rank)
        await asyncio.sleep(2.0)
        assert [r.generation for r in pool.replicas] == [2]
        assert [f["reason"] for n, f in h.notes if n == "replica_lost"][1] == (
            f"its process {102 + rank} has ended"
        )
        await h.service.stop()

    run(scenario())


def test_nobody_waits_for_a_rank_that_is_silent() -> None:
    async def scenario() -> None:
        h = house()
        pool = await three(h)
        with pytest.raises(RunError, match="did not answer within 4 s"):
            await pool.route(
                "step", lambda: 0, lambda: asyncio.sleep(1e6), lambda: 0, timeout_s=4.0
            )
        await h.service.stop()

    run(scenario())


def test_devices_are_those_of_all_ranks() -> None:
    async def scenario() -> None:
        h = house()
        await three(h, gpus=2, replicas=2)
        assert sorted(h.processes.gpus) == [(0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11)]
        await h.service.stop()

    run(scenario())


def test_a_process_of_several_beats_for_all_and_ends_with_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: set[int] = set()
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(process_module, "has_ended", ended.__contains__)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))

    def pulse(pid: int) -> Any:
        async def beat() -> Heartbeat:
            prepared = Preparation(pid - 7, 4)
            return Heartbeat(pid, 100 * pid << 20, pid, prepared)

        return SimpleNamespace(beat=SimpleNamespace(call_one=beat))

    procs: Any = SimpleNamespace()
    process = ReplicaProcess("trainer0x1", "here", procs, [pulse(7), pulse(8)], local=True)
    assert (process.pid, process.ended_pid()) == (0, 0)
    assert asyncio.run(process.beat()) == 1500 << 20
    # The rank that is least far decides, and memory counts by 16 MiB: 93.75.
    assert (process.progress, process.prepared) == ((15, 93), Preparation(0, 4))
    assert (process.pid, process.pids, process.ended_pid()) == (7, (7, 8), 0)
    ended.add(8)
    assert process.ended_pid() == 8
    process.kill()
    assert killed == [(7, signal.SIGKILL), (8, signal.SIGKILL)]
