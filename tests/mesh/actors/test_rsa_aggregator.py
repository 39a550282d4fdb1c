"""Test actors in processes: environment, RSA aggregator, and ports that stream."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from episode_setup import a_task, expected_after, solution
from monarch.actor import Actor, concurrent_endpoint, this_host

from cartridge_forge.actors.environment import EnvironmentActor
from cartridge_forge.actors.heartbeat import HeartbeatActor, HeartbeatHandle, PortCall, open_port
from cartridge_forge.actors.rsa_aggregator import RSAAggregatorActor
from cartridge_forge.plugins.chat.episodes import EnvironmentReply, EnvironmentRequest, Observation
from cartridge_forge.plugins.cluster.hosts.host_heartbeats import HostBeatsActor, WatchedProcess
from cartridge_forge.plugins.environments.spec import EnvironmentSpec, ProblemsSpec
from cartridge_forge.plugins.rsa.spec import RsaSpec
from cartridge_forge.plugins.strategies.rsa.populations import (
    AggregationInput,
    JudgedPopulation,
    RSAProblem,
)
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.protocols.step import stream_seed
from cartridge_forge.services.pool.pool import Pool, gather
from cartridge_forge.services.pool.service import Service

SPEC = RsaSpec(
    M=2, N=2, K=2, T=2, task="math",
    problems=ProblemsSpec(kind="reasoning_gym", name="chain_sum", seed=3, timeout_s=10.0),
)  # fmt: skip
# What some answer, a power tower among it, which sympy would never be done with.
SAID = (
    r"\boxed{7}",
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{9^{9^{9^{8}}}}",
    "hm",
    r"\boxed{\frac{14}{2}}",
)


@asynccontextmanager
async def pool_of(n: int) -> AsyncIterator[Pool]:
    service = await Service.of(this_host(), call_timeout_s=120.0, spawn_timeout_s=120.0)
    try:
        pool = service.spawn(
            RSAAggregatorActor, n=n, args=(SPEC,), role="rsa_aggregator", spec=RoleSpec()
        )
        await service.ready()
        yield pool
    finally:
        await service.stop()


def say(prompt: str, name: str) -> str:
    """What a student would: anything, but always the same to the same prompt."""
    return SAID[stream_seed(f"{name}/{prompt}") % len(SAID)]


async def play(pool: Pool, problems: list[RSAProblem], kill: bool) -> list[list[JudgedPopulation]]:
    """Runs of every problem, two to a call; one replica is killed under the second turn."""
    texts: list[tuple[str, ...]] = [()] * len(problems)
    found: list[list[JudgedPopulation]] = [[] for _ in problems]
    for step in range(SPEC.T + 1):
        standings = [
            AggregationInput(p.id, f"rsa/{p.id}", p, step, said)
            for p, said in zip(problems, texts, strict=True)
        ]
        calls = [pool.route("turn", standings[i : i + 2]) for i in range(0, len(standings), 2)]
        turn = asyncio.ensure_future(gather(calls))
        if kill and step == 1:
            await asyncio.sleep(0.05)
            process = pool.replicas[0].process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)
        judged = [one for share in await turn for one in share]
        for own, one in zip(found, judged, strict=True):
            own.append(one)
        texts = [
            tuple(say(prompt, f"{p.id}/{i}") for i, prompt in enumerate(one.prompts))
            for p, one in zip(problems, judged, strict=True)
        ]
    return found


def test_runs_outlive_the_aggregator_that_judged_them() -> None:
    async def both() -> tuple[
        list[RSAProblem], list[list[JudgedPopulation]], list[list[JudgedPopulation]]
    ]:
        async with pool_of(2) as pool:
            problems = await pool.route("problems", range(4), "primer")
            calm = await play(pool, problems, kill=False)
            struck = await play(pool, problems, kill=True)
            assert pool.restarts == 1
            with pytest.raises(DataError, match="stands before population 3"):
                await pool.route("turn", [AggregationInput("r", "r", problems[0], 3)])
            return problems, calm, struck

    problems, calm, struck = asyncio.run(both())
    assert struck == calm
    assert [p.id for p in problems] == [f"chain_sum/{i}" for i in range(4)]
    for first, second, last in calm:
        assert (len(first.prompts), len(second.prompts), len(last.prompts)) == (4, 4, 0)
        assert [c.error for one in (second, last) for c in one.candidates] == [""] * 8


TASKS = [a_task(seed) for seed in range(32)]
EPISODES = [("sing.", "find sodium in nowhere.", *solution(task)) for task in TASKS]


@asynccontextmanager
async def environment_pool_of(spec: EnvironmentSpec, n: int) -> AsyncIterator[Pool]:
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
        async with environment_pool_of(EnvironmentSpec(), 2) as pool:
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
            async with environment_pool_of(spec, 1) as pool:
                reply: EnvironmentReply = await pool.route("move", moves_after(0)[:4])
                assert reply.compute_seconds >= 0.5
                return list(reply.observations)

        seen = asyncio.run(play())
    assert [o.error for o in seen] == ["environment_died: no answer within 0.5 s"] * 4
    assert all(o.done and o.reward is None for o in seen)


SECONDS = 60.0
PERIOD_S = 2.0


class Answerer(Actor):
    """Answers over a port, the second question late."""

    def __init__(self) -> None:
        self.second = asyncio.Event()

    @concurrent_endpoint
    async def listen(self, method: str) -> Any:
        return open_port(getattr(self, method))

    async def square(self, number: int) -> int:
        if number < 0:
            raise ValueError(f"{number} is below 0")
        return number * number

    async def last(self) -> str:
        await self.second.wait()
        return "the first"

    async def release(self) -> None:
        self.second.set()


class Caller(Actor):
    """Asks a heartbeat actor, and one that asks it for its host, before and after it is stopped."""

    def __supervise__(self, failure: Any) -> bool:
        return True

    @concurrent_endpoint
    async def ask(self, how: str) -> dict[str, Any]:
        host = this_host()
        procs = host.spawn_procs(per_host={"procs": 1}, name=f"asked{how}")
        speaking = host.spawn_procs(per_host={"procs": 1}, name=f"speaks{how}")
        actor = procs.spawn("asked", HeartbeatActor, None)
        handle = HeartbeatHandle(actor)
        speaker = HeartbeatHandle(speaking.spawn("speaks", HostBeatsActor, None))
        beat = await handle.beat.call_one()
        process = {"p": WatchedProcess((handle.beat,), (beat.pid,))}
        before = await speaker.beat_host.call_one(("p",), process, PERIOD_S)
        if how == "actor":
            await actor.stop()
        elif how == "process":
            await procs.stop()
        else:
            os.kill(beat.pid, signal.SIGKILL)
        told = before
        for _ in range(3):
            told = await speaker.beat_host.call_one(("p",), {}, PERIOD_S)
        said = await asyncio.gather(*(reply(handle.beat) for _ in range(3)))
        await speaking.stop()
        return {
            "before": [b.pid == beat.pid for b in before["p"].beats], "said": list(said),
            "older": told["p"].age_s > before["p"].age_s or bool(told["p"].ended),
        }  # fmt: skip

    @concurrent_endpoint
    async def lives(self) -> bool:
        return True


async def reply(call: PortCall) -> str:
    try:
        async with asyncio.timeout(PERIOD_S):
            return f"a reply: {await call.call_one()}"
    except TimeoutError:
        return "no reply"


@pytest.mark.parametrize("how", ["actor", "process", "killed"])
def test_whoever_asks_one_that_is_no_more_goes_on(how: str) -> None:
    """An endpoint call to an actor that was stopped ends its caller in Monarch 0.7."""

    async def scenario() -> tuple[dict[str, Any], bool]:
        procs = this_host().spawn_procs(per_host={"procs": 1}, name=f"asks{how}")
        caller = procs.spawn("asks", Caller)
        async with asyncio.timeout(SECONDS):
            said = await caller.ask.call_one(how)
            lives = await caller.lives.call_one()
            await procs.stop()
        return said, lives

    assert asyncio.run(scenario()) == (
        {"before": [True], "said": ["no reply"] * 3, "older": True}, True,
    )  # fmt: skip


def test_calls_over_a_port_are_served_at_once_and_raise_what_the_method_raises() -> None:
    async def scenario() -> None:
        procs = this_host().spawn_procs(per_host={"procs": 1}, name="answers")
        actor = procs.spawn("answers", Answerer)
        square, last = PortCall(actor, "square"), PortCall(actor, "last")
        async with asyncio.timeout(SECONDS):
            assert await asyncio.gather(*(square.call_one(n) for n in range(20))) == [
                n * n for n in range(20)
            ]
            with pytest.raises(ValueError, match="-1 is below 0"):
                await square.call_one(-1)
            waiting = asyncio.ensure_future(last.call_one())
            assert await square.call_one(3) == 9, "one that waits holds up no other"
            assert not waiting.done()
            await PortCall(actor, "release").call_one()
            assert await waiting == "the first"
            await procs.stop()

    asyncio.run(scenario())
