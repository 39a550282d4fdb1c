"""Requests go to the samplers in turn, and their results come back in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cartridge_forge.plugins.strategies.samplers.sampler import (
    Ability,
    AlternatingSampler,
    SampleRequest,
    SampleResult,
)
from cartridge_forge.protocols.step import Sampling
from cartridge_forge.protocols.teacher_replay import AgentMessage


class Named:
    def __init__(self, name: str, *abilities: Ability) -> None:
        self.name, self.abilities = name, frozenset(abilities)

    async def __call__(self, asks: Sequence[SampleRequest]) -> list[SampleResult]:
        return [SampleResult(f"{self.name}{ask.id}", 1, 1, "stop") for ask in asks]


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, []), (1, ["a0"]), (2, ["a0", "b1"]), (5, ["a0", "b1", "c2", "a3", "b4"])],
)
def test_request_i_goes_to_sampler_i_modulo_their_number(count: int, said: list[str]) -> None:
    sampler = AlternatingSampler([Named(name, "seed") for name in "abc"])
    asks = [
        SampleRequest(str(i), (AgentMessage("user", "what?"),), Sampling(max_tokens=4), seed=i)
        for i in range(count)
    ]
    assert [result.text for result in asyncio.run(sampler(asks))] == said


def test_its_abilities_are_those_of_all() -> None:
    both = AlternatingSampler([Named("a", "seed", "logprobs"), Named("b", "logprobs", "until")])
    assert both.abilities == {"logprobs"}
