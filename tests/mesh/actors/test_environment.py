"""Actors that step the desk: spawned by the service, killed in the middle of episodes."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from desk_tasks import a_task, expected_after, solution
from monarch.actor import this_host

from cartridge_forge.actors.environment import EnvironmentActor
from cartridge_forge.plugins.episodes.spec.environment import EnvironmentSpec
from cartridge_forge.protocols.episodes import EnvironmentReply, EnvironmentRequest, Observation
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.services.pool.pool import Pool
from cartridge_forge.services.pool.service import Service

TASKS = [a_task(seed) for seed in range(32)]
EPISODES = [("sing.", "find sodium in nowhere.", *solution(task)) for task in TASKS]


@asynccontextmanager
async def pool_of(spec: EnvironmentSpec, n: int) -> AsyncIterator[Pool]:
    service = await Service.of(this_host(), call_timeout_s=120.0, spawn_timeout_s=120.0)
    try:
        pool = service.spawn(
            EnvironmentActor, n=n, args=((spec,), 12), role="environment", spec=RoleSpec()
        )
        await service.ready()
        yield pool
    finally:
        await service.stop()


def moves_after(played: int) -> list[EnvironmentRequest]:
    return [
        EnvironmentRequest(task, episode[:played])
        for task, episode in zip(TASKS, EPISODES, strict=True)
    ]


def wanted(moves: Sequence[EnvironmentRequest]) -> list[Observation]:
    return [expected_after(move.task, move.actions) for move in moves]


def test_episodes_outlive_the_replica_that_played_them() -> None:
    """32 episodes, a few to a call, on two replicas, of which one is killed half way."""

    async def ask(pool: Pool, moves: list[EnvironmentRequest]) -> list[Observation]:
        calls = [pool.route("move", moves[i : i + 8]) for i in range(0, len(moves), 8)]
        replies: list[EnvironmentReply] = await asyncio.gather(*calls)
        assert all(reply.compute_seconds > 0 for reply in replies)
        return [seen for reply in replies for seen in reply.observations]

    async def play() -> list[list[Observation]]:
        async with pool_of(EnvironmentSpec(), 2) as pool:
            seen = [await ask(pool, moves_after(n)) for n in range(3)]
            process = pool.replicas[0].process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)
            return seen + [await ask(pool, moves_after(n)) for n in range(3, 6)]

    seen = asyncio.run(play())
    assert seen == [wanted(moves_after(n)) for n in range(6)]
    assert {o.reward for o in seen[-1]} == {1.0}


def test_a_server_that_says_nothing_is_an_error_of_every_episode() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"

        async def play() -> list[Observation]:
            spec = EnvironmentSpec(kind="openenv", url=url, timeout_s=0.5)
            async with pool_of(spec, 1) as pool:
                reply: EnvironmentReply = await pool.route("move", moves_after(0)[:4])
                assert reply.compute_seconds >= 0.5
                return list(reply.observations)

        seen = asyncio.run(play())
    assert [o.error for o in seen] == ["environment_died: no answer within 0.5 s"] * 4
    assert all(o.done and o.reward is None for o in seen)
