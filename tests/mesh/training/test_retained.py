"""What the controller keeps does not grow with the steps or the tokens of a run."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from loop_setup import House, run

from cartridge_forge.protocols.step import (
    Completion,
    GenerateOutput,
    GenerateRequest,
    PrefixRef,
    Sampling,
)
from cartridge_forge.services.clients import REMEMBERED, GeneratorClient, Packed
from cartridge_forge.training.records import Rollout

STEPS, TOKENS = 30, 20_000


@pytest.fixture(autouse=True)
def new_objects_alone_are_collected() -> Iterator[None]:
    """Else each collection visits all that the tests before have left, for a second or two."""
    gc.freeze()
    yield
    gc.unfreeze()


class Counting(House):
    """Makes rollouts of many tokens, and knows which of them are still kept anywhere."""

    def __init__(self, staleness: int) -> None:
        super().__init__(staleness, {0})
        self.made: list[weakref.ref[Rollout]] = []

    async def sample(self, step: int, version: int) -> Rollout:
        small = await super().sample(step, version)
        [sample] = small.samples
        prompt = tuple(range(step, step + TOKENS))
        long = type(sample)(**{**vars(sample), "prompt_ids": prompt})
        rollout = Rollout(step, (), (), (long,))
        self.made.append(weakref.ref(rollout))
        return rollout

    @property
    def alive(self) -> int:
        gc.collect()
        return sum(one() is not None for one in self.made)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_loop_keeps_the_rollouts_that_are_ahead_and_no_others(staleness: int) -> None:
    async def scenario() -> None:
        house = Counting(staleness)
        loop = house.loop(0, STEPS)
        most = 0
        for step in range(STEPS):
            await loop.step(step)
            most = max(most, house.alive)
        await loop.rollouts.close()
        # Those of later steps, and the one of the step that has just ended.
        assert most <= staleness + 2
        assert len(house.made) == STEPS

    run(scenario())


class OnePool:
    """A generator's pool whose replica answers every request with TOKENS tokens."""

    target = 1

    async def split(self, items: Any, work: Any, most: int | None = None) -> list[Any]:
        return list(await work(items))

    async def route_named(self, method: str, requests: Packed) -> Any:
        done = tuple(
            Completion(r.id, tuple(range(TOKENS)), (-1.0,) * TOKENS, (0,) * TOKENS, "length")
            for r in requests.value
        )
        return "generator[0]", GenerateOutput(0.0, done)


def test_a_client_of_generators_keeps_names_and_no_tokens() -> None:
    client = GeneratorClient({"generator": OnePool()})  # type: ignore[dict-item]
    prefix = PrefixRef("document/none", 0)

    async def step(number: int) -> None:
        requests = [
            GenerateRequest(f"on_policy/{number}/{i}", (1, 2), prefix, Sampling(), i)
            for i in range(4)
        ]
        await client.generate(requests)

    async def scenario() -> None:
        tracemalloc.start()
        await step(0)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1, STEPS):
            await step(number)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        # 116 completions passed, of 480 KB of references each; their ids are kept.
        assert grown < 100_000
        assert 4 * STEPS < REMEMBERED

    asyncio.run(scenario())
