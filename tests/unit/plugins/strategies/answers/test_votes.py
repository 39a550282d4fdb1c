"""Votes and confidences, by hand."""

import asyncio

import pytest

from cartridge_forge.plugins.strategies.answers.votes import surest, tally
from cartridge_forge.plugins.strategies.deepconf import (
    group_confidences,
    token_confidences,
    trace_confidence,
)


def test_missing_answers_never_vote_and_ties_go_to_the_earliest() -> None:
    answers = [None, "3", "1/2", None, "0.5", "3.0", None]
    votes = asyncio.run(tally(answers, "math"))
    assert [(v.answer, v.weight, v.traces) for v in votes] == [
        ("3", 2.0, (1, 5)),
        ("1/2", 2.0, (2, 4)),
    ]
    assert asyncio.run(tally([None, None], "math")) == []


def test_weights_decide_over_numbers() -> None:
    votes = asyncio.run(tally(["a", "b", "a"], "rg", [1.0, 2.5, 1.0]))
    assert [(v.answer, v.weight) for v in votes] == [("b", 2.5), ("a", 2.0)]


@pytest.mark.parametrize(
    ("confidences", "fraction", "kept"),
    [
        ([1.0, 3.0, 2.0, 2.5], 0.5, [1, 3]),
        ([1.0, 3.0, 2.0], 0.5, [1, 2]),  # 1.5 traces are 2
        ([1.0, 1.0, 1.0], 0.1, [0]),  # of equals the earliest, and at least one
        ([1.0, 2.0], 1.0, [0, 1]),
        (list(range(10)), 0.7, [3, 4, 5, 6, 7, 8, 9]),
        ([], 0.5, []),
    ],
)
def test_surest(confidences: list[float], fraction: float, kept: list[int]) -> None:
    assert surest(confidences, fraction) == kept


def test_confidence_of_a_token_is_minus_the_mean_of_its_top_k() -> None:
    places = [(("a", -0.5), ("b", -1.5), ("c", -4.0)), (("a", -1.0),)]
    assert token_confidences(places, 3) == [2.0, 1.0]
    assert token_confidences(places, 2) == [1.0, 1.0]


def test_confidence_of_groups_and_traces() -> None:
    said = [4.0, 2.0, 0.0, 4.0, 6.0, 8.0]
    assert group_confidences(said, 2) == [3.0, 1.0, 2.0, 5.0, 7.0]
    assert group_confidences(said, 7) == [4.0]
    assert group_confidences([], 7) == []
    assert trace_confidence(said, "mean", 2) == 4.0
    assert trace_confidence(said, "tail", 2) == 7.0
    assert trace_confidence(said, "tail", 9) == 4.0
    assert trace_confidence(said, "lowest_group", 2) == 1.0
    assert trace_confidence(said, "lowest_tenth", 2) == 1.0  # of five groups: one
    assert trace_confidence([], "lowest_group", 2) == 0.0
    # Twenty groups of one: the lowest two.
    assert trace_confidence([float(c) for c in range(20)], "lowest_tenth", 1) == 0.5
