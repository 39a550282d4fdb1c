"""Test strategies in processes: reward models and RSA."""

from __future__ import annotations

import asyncio
from math import comb
from pathlib import Path

import pytest
from rooms.strategies.rsa_setup import accuracies, majority_copier
from scripted_sampler import Scripted, words
from strategy_setup import probability, reward_model

from benchmarks.rsa_batching import measure
from cartridge_forge.plugins.statistics.intervals import wilson_interval
from cartridge_forge.plugins.strategies.catalog import parse, run
from cartridge_forge.plugins.strategies.judges.opening import opened_judge
from cartridge_forge.plugins.strategies.problem import StrategyResult
from cartridge_forge.plugins.strategies.samplers.sampler import SampleRequest
from cartridge_forge.plugins.strategies.scorers import SEPARATOR
from cartridge_forge.plugins.strategies.spec import ProcessRewardSpec, RewardModelSpec
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.teacher_replay import AgentMessage

SAID = {0: "bad bad", 1: "good bad", 2: "good good", 3: "bad"}


def script(ask: SampleRequest) -> list:
    return words(SAID[int(ask.id.rpartition("/")[2]) % 4])


def spec(path: Path, **more: object) -> ProcessRewardSpec:
    return ProcessRewardSpec(model=RewardModelSpec(path=str(path), separator="\n", **more))


def test_strategies_keep_what_the_reward_model_likes(tmp_path: Path) -> None:
    async def solved() -> tuple[list[float], list[StrategyResult]]:
        async with opened_judge(spec(reward_model(tmp_path)), "frontier/x") as judge:
            assert judge is not None
            told = await judge(
                [f"what is it{SEPARATOR}{said}{SEPARATOR}" for said in SAID.values()]
            )
            results = []
            for name, options in (
                ("best_of_n", {"candidates": 4}),
                ("beam_search", {"candidates": 4, "beams": 2, "aggregate": "product"}),
            ):
                strategy = parse(name, {**options, "scorer": "process_reward"})
                result = await run(
                    strategy, Scripted(script), (AgentMessage("user", "what is it"),),
                    form="general", seed=0, max_tokens=20, judge=judge,
                )  # fmt: skip
                results.append(result)
            return list(told), results

    told, results = asyncio.run(solved())
    wanted = [probability(0, 2, 4, 2), probability(1, 1, 4, 2), probability(2, 0, 4, 2),
              probability(0, 1, 4, 2)]  # fmt: skip
    assert told == pytest.approx(wanted, abs=1e-6)
    for result in results:
        assert result.text == "good good"
        best = max(path["score"] for path in result.details["finished"])
        assert best == pytest.approx(probability(2, 0, 4, 2), abs=1e-6)


def test_what_cannot_be_read_is_told_before_anything_is_sampled(tmp_path: Path) -> None:
    async def opened() -> None:
        async with opened_judge(spec(tmp_path), "x"):
            pytest.fail("it opened")

    with pytest.raises(SpecError, match=r"process_reward\.model: .* cannot be read as a reward"):
        asyncio.run(opened())


def test_a_population_is_one_call_and_faster_than_its_responses_in_turn() -> None:
    measured = measure(repeats=3, M=1, N=16, K=4, T=4)
    assert (measured["batched_calls"], measured["sequential_calls"]) == (4, 64)
    assert measured["ratio"] > 1.5  # 4.0 to 4.8 on a quiet machine


def test_a_copier_of_the_majority_drifts_from_below_a_half_down_and_from_above_up() -> None:
    """One step by the hypergeometric formula; a leak of the right answers would lift the first."""
    n, right, questions = 16, 6, 60
    found = accuracies(majority_copier(right), questions, N=n, K=3, T=6)
    pairs = comb(right, 2) * (n - right) + comb(right, 3)
    low, high = wilson_interval(round(found[1] * questions * n), questions * n)
    assert low <= pairs / comb(n, 3) <= high
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0] / 2
    risen = accuracies(majority_copier(n - right), questions, N=n, K=3, T=6)
    assert risen == sorted(risen)
    assert risen[-1] > 1 - found[0] / 2
