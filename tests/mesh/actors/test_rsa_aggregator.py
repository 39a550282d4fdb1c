"""Aggregators in the mesh: one is killed in the middle of runs, and they end as they would have."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from monarch.actor import this_host

from cartridge_forge.actors.rsa_aggregator import RSAAggregatorActor
from cartridge_forge.plugins.episodes.spec.problems import ProblemsSpec
from cartridge_forge.plugins.rsa.spec import RsaSpec
from cartridge_forge.plugins.strategies.rsa.records import (
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
