"""Islands merge in pairs, on time, and nobody sees over to another before."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.strategies.rsa_setup import Scripted, place

from cartridge_forge.plugins.strategies.rsa.engine import RSAEngine
from cartridge_forge.plugins.strategies.rsa.islands import RSAShape, draw_parents
from cartridge_forge.plugins.strategies.samplers.sampler import SampleRequest
from cartridge_forge.protocols.errors import DataError

PRINTS = """
import asyncio, json
from rooms.strategies.rsa_setup import Scripted
from cartridge_forge.plugins.strategies.rsa import RSAEngine
sampler = Scripted(lambda ask, shown: f"{ask.id} {len(shown)}")
RSAEngine(sampler, M=4, N=4, K=2, T=6, task="general", seed=7).run(["a?", "b?"])
asks = [(a.id, a.seed, a.messages[-1].content) for batch in sampler.batches for a in batch]
print(json.dumps(asks))
"""


@pytest.mark.parametrize(
    ("m", "t", "schedule"),
    [
        (1, 3, (1, 1, 1)),
        (2, 2, (2, 1)),
        (2, 6, (2, 2, 2, 1, 1, 1)),
        (4, 3, (4, 2, 1)),
        (4, 6, (4, 4, 2, 2, 1, 1)),
        (8, 4, (8, 4, 2, 1)),
        (8, 8, (8, 8, 4, 4, 2, 2, 1, 1)),
    ],
)
def test_the_schedule_by_hand(m: int, t: int, schedule: tuple[int, ...]) -> None:
    assert RSAShape(m, 4, 2, t).schedule == schedule


def test_blocks_are_neighbours_and_a_merge_makes_one_of_two() -> None:
    shape = RSAShape(M=4, N=2, K=2, T=6)
    assert [list(shape.block(5, t)) for t in range(6)] == [
        [4, 5], [4, 5], [4, 5, 6, 7], [4, 5, 6, 7], [*range(8)], [*range(8)]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ({"M": 3}, "M must be a power of two, .*: got 3; use 2 or 4"),
        ({"M": 0}, "M must be a whole number >= 1: got 0"),
        ({"N": 2.0}, "N must be a whole number >= 1: got 2.0"),
        ({"K": 5}, r"K must be <= N \(4\), .*: got 5; lower K or raise N"),
        ({"M": 4, "T": 4}, r"T must be divisible by log2\(M\) \+ 1 = 3.*: got 4; use 3 or 6"),
        ({"M": 4, "T": 1}, "T must be divisible.*use 3, or another M"),
    ],
)
def test_numbers_that_do_not_go_together(numbers: dict[str, int], told: str) -> None:
    with pytest.raises(DataError, match=f"^rsa: {told}"):
        RSAEngine(Scripted(lambda ask, shown: ""), **numbers)


@settings(max_examples=25)
@given(
    m=st.sampled_from([1, 2, 4, 8]), n=st.integers(1, 5), rounds=st.integers(1, 3), data=st.data()
)
def test_parents_are_k_others_of_the_block_that_the_slot_is_in(
    m: int, n: int, rounds: int, data: st.DataObject
) -> None:
    shape = RSAShape(m, n, data.draw(st.integers(1, n)), rounds * m.bit_length())
    for t in range(1, shape.T):
        for slot, own in enumerate(draw_parents(shape, t, f"rsa/{n}/0")):
            assert len(set(own)) == len(own) == shape.K
            assert set(own) <= set(shape.block(slot, t))
            assert slot in shape.block(slot, t)


def test_at_a_merge_a_slot_draws_from_its_new_block() -> None:
    """With K = N, a slot of two just merged islands must meet the other in some of 64 draws."""
    shape = RSAShape(M=2, N=4, K=4, T=2)
    drawn = [draw_parents(shape, 1, f"rsa/0/{q}")[0] for q in range(64)]
    assert {p for own in drawn for p in own} == set(range(8))


@pytest.mark.parametrize(("m", "t"), [(1, 4), (2, 2), (2, 6), (4, 3), (4, 6), (8, 4), (8, 8)])
def test_ancestry_is_exactly_that_of_the_parents_and_inside_the_block(m: int, t: int) -> None:
    """Every text names the slots of population 0 that it comes from."""

    def origins(ask: SampleRequest, shown: list[str]) -> str:
        if not shown:
            return f"from {place(ask)[2]}"
        return f"from {' '.join(sorted({o for text in shown for o in text.split()[1:]}, key=int))}"

    engine = RSAEngine(Scripted(origins), M=m, N=3, K=2, T=t, task="general", seed=5)
    (run,) = engine.run(["who?"]).runs
    shape = RSAShape(m, 3, 2, t)
    expected = [{slot} for slot in range(shape.slots)]
    for step, population in enumerate(run.populations):
        if step:
            expected = [set().union(*(expected[p] for p in own)) for own in population.parents]
        found = [{int(o) for o in text.split()[1:]} for text in population.texts]
        assert found == expected
        assert population.islands == shape.schedule[step]
        for slot, ancestors in enumerate(found):
            assert ancestors <= set(shape.block(slot, step))
    if m > 1:  # and at last somebody comes from more than one island
        assert any(len({o // 3 for o in ancestors}) > 1 for ancestors in expected)


def test_two_processes_ask_the_same_whatever_their_hash_seed() -> None:
    said = [
        subprocess.run(
            [sys.executable, "-c", PRINTS], capture_output=True, text=True, check=True, timeout=120,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "77")
    ]  # fmt: skip
    assert said[0] == said[1]
    asks = json.loads(said[0])
    assert len(asks) == 2 * 16 * 6
    assert len({seed for _, seed, _ in asks}) == len(asks)
