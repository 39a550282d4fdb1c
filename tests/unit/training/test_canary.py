"""A generator without evidence of its own is asked at each publish, and the trainer scores it."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from cartridge_forge.protocols.errors import StaleTokenError
from cartridge_forge.protocols.step import (
    CartridgeSnapshot,
    Completion,
    GenerateRequest,
    PublishedCartridge,
    Sample,
    TensorLayout,
    TensorRef,
)
from cartridge_forge.training.canary import Canary

DOCUMENTS = {"a": tuple(range(10, 30)), "b": (3, 4, 5), "none": (1,)}
PACKET = TensorRef("k", TensorLayout(()))
SNAPSHOT = CartridgeSnapshot(
    7, (PublishedCartridge("a", 7, PACKET), PublishedCartridge("b", 3, PACKET))
)


@dataclass
class House:
    """Replicas that say the tokens of `texts[replica][document]`; a trainer that finds the last
    token of each text so many nats too unlikely."""

    texts: Mapping[str, Mapping[str, int]]
    deficits: Mapping[int, float]
    asked: list[GenerateRequest] = field(default_factory=list)
    scored: list[Sample] = field(default_factory=list)

    async def ask_each(
        self, requests: Sequence[GenerateRequest]
    ) -> dict[str, tuple[Completion, ...]]:
        self.asked += requests
        return {
            replica: tuple(
                Completion(r.id, (5, said[r.prefix.name[-1]]), (), (7, 7), "length")
                for r in requests
            )
            for replica, said in self.texts.items()
        }

    async def greedy_deficit(self, samples: Sequence[Sample], version: int) -> list[float]:
        assert version == 7
        self.scored += samples
        return [self.deficits[s.response_ids[-1]] for s in samples]


def check(house: Any) -> None:
    asyncio.run(Canary(house, house, DOCUMENTS, most=0.01).check(SNAPSHOT))


def test_greedy_texts_of_the_published_version_pass() -> None:
    same = {"a": 20, "b": 21}
    house = House({"generator[0]": same, "generator[1]": same}, {20: 0.0, 21: 0.01})
    check(house)
    assert [(r.id, r.prompt_ids) for r in house.asked] == [
        ("canary/7/a", tuple(range(10, 18))),
        ("canary/7/b", (3, 4, 5)),
    ]
    assert {(r.prefix.name, r.prefix.version) for r in house.asked} == {
        ("cartridge/a", 7), ("cartridge/b", 7),
    }  # fmt: skip
    assert {r.sampling.temperature for r in house.asked} == {0.0}
    assert [(s.cartridge, s.prompt_ids, s.response_ids) for s in house.scored] == [
        ("a", tuple(range(10, 18)), (5, 20)),
        ("b", (3, 4, 5), (5, 21)),
    ], "a text that several replicas say is scored once"


@pytest.mark.parametrize("deficit", [0.0101, 3.0, float("nan")])
def test_the_replica_that_says_something_else_is_named(deficit: float) -> None:
    house = House(
        {"generator[0]": {"a": 20, "b": 21}, "generator[1]": {"a": 20, "b": 99}},
        {20: 0.0, 21: 0.0, 99: deficit},
    )
    with pytest.raises(
        StaleTokenError, match=r"^generator\[1\] continued the start of b over cartridge version 7 "
    ):
        check(house)
