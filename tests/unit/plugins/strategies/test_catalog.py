"""Strategies by name: all that are advertised can be had, and mistakes are told."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from strategy_setup import ASKED, VARIANTS, solve

from cartridge_forge.plugins.strategies.answers.extract import FORMS, Form
from cartridge_forge.plugins.strategies.catalog import STRATEGIES, parse
from cartridge_forge.plugins.strategies.deepconf import DeepConf
from cartridge_forge.plugins.strategies.problem import StrategyCost
from cartridge_forge.plugins.strategies.rsa.prompts import (
    ATTEMPT_WORDS,
    PROMPT_WORDS,
    aggregation_prompt,
)
from cartridge_forge.plugins.strategies.search import BeamSearch
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.teacher_replay import AgentMessage


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_advertised_strategy_can_be_instantiated(name: str) -> None:
    strategy = parse(name)
    assert type(strategy) is STRATEGIES[name]
    assert strategy == parse(name, {})
    assert hash(strategy) == hash(parse(name))
    with pytest.raises((ValueError, dataclasses.FrozenInstanceError)):
        strategy.anything = 1  # type: ignore[attr-defined]


def test_options_are_read_as_json_has_them() -> None:
    strategy = parse(
        "beam_search",
        {"beams": 3, "aggregate": "min", "detector": {"step_patterns": [r"\n"], "min_tokens": 2}},
    )
    assert isinstance(strategy, BeamSearch)
    assert (strategy.beams, strategy.candidates, strategy.aggregate) == (3, 4, "min")
    assert strategy.detector.step_patterns == (r"\n",)
    assert parse("deepconf", {"keep_fraction": 1}) == DeepConf(keep_fraction=1.0)


@pytest.mark.parametrize(
    ("name", "options", "words_of_it"),
    [
        ("best_of_m", {}, r"got 'best_of_m'; expected .*; did you mean best_of_n\?"),
        ("x", {}, "expected one of chain_of_thought, self_consistency"),
        ("best_of_n", {"candidates": 0}, "best_of_n: option candidates: .* equal to 1, got 0"),
        ("best_of_n", {"candidates": "4"}, "option candidates: .* valid integer, got '4'"),
        ("best_of_n", {"n": 4}, "option n: there is none of this name; remove it"),
        ("deepconf", {"keep_fraction": 90}, "option keep_fraction: .* equal to 1, got 90"),
        (
            "deepconf",
            {"mode": "online", "traces": 16},
            r"option warmup: must be < traces \(16\); lower it, .* got 16",
        ),
        ("deepconf", {"measure": "median"}, "option measure: .* 'lowest_group'"),
        ("beam_search", {"aggregate": "product"}, "option scorer: must be gap or process_reward"),
        ("adaptive_scaling", {"alpha": 1.0}, "option alpha: .* less than 1"),
        ("beam_search", {"detector": {"min": 1}}, "option detector.min: there is none"),
    ],
)
def test_mistakes_are_told(name: str, options: dict[str, object], words_of_it: str) -> None:
    with pytest.raises(DataError, match=words_of_it):
        parse(name, options)


@pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=[name for name, _ in VARIANTS])
def test_no_strategy_samples_more_than_its_cost(variant: int) -> None:
    name, options = VARIANTS[variant]
    cost = parse(name, options).cost()
    for seed in range(5):
        _, sampler = solve(variant, seed)
        assert max(map(len, sampler.calls)) <= cost.sequences
        assert sum(map(len, sampler.calls)) <= cost.responses
        asks = [ask for call in sampler.calls for ask in call]
        read = [words_of(ask.messages) + len(ask.begun.token_ids) for ask in asks]
        assert max(read) <= words_of(ASKED) + cost.again * 30 + cost.words


def words_of(messages: Sequence[AgentMessage]) -> int:
    return sum(len(m.content.split()) for m in messages)


@pytest.mark.parametrize("task", FORMS)
@pytest.mark.parametrize("count", [1, 2, 1000])
def test_the_words_around_attempts_are_no_more_than_told(task: Form, count: int) -> None:
    prompt = aggregation_prompt("", [""] * count, task)
    assert len(prompt) <= PROMPT_WORDS + ATTEMPT_WORDS * count


@pytest.mark.parametrize(
    ("name", "options", "cost"),
    [
        ("chain_of_thought", {}, (1, 1)),
        ("self_consistency", {"samples": 7}, (7, 7)),
        ("part_vote", {"samples": 7}, (7, 7)),
        ("deepconf", {"traces": 9}, (9, 9)),
        ("deepconf", {"mode": "online", "traces": 9, "warmup": 3}, (6, 9)),
        ("deepconf", {"mode": "online", "traces": 9, "warmup": 3, "consensus": True}, (6, 9)),
        ("best_of_n", {"candidates": 4, "max_steps": 3}, (4, 16, 1)),
        ("beam_search", {"beams": 2, "candidates": 4, "max_steps": 3}, (8, 32, 1)),
        ("phi_decoding", {"beams": 2, "rollouts": 3, "max_steps": 4}, (6, 48, 1)),
        ("adaptive_scaling", {"candidates": 4, "max_steps": 3}, (4, 16, 1)),
        ("rsa", {"M": 2, "N": 4, "K": 3, "T": 3}, (8, 24, 3, 712)),
        ("rsa", {"M": 2, "N": 4, "T": 1}, (8, 8)),
    ],
)
def test_the_cost_by_hand(name: str, options: dict[str, Any], cost: tuple[int, ...]) -> None:
    assert parse(name, options).cost() == StrategyCost(*cost)
