"""Strategies by name: all that are advertised can be had, and mistakes are told."""

import dataclasses

import pytest

from protocols.errors import DataError
from strategies.catalog import STRATEGIES, parse
from strategies.deepconf import DeepConf
from strategies.search import BeamSearch


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
