"""Phi decoding: pruning, weights and look-aheads, by hand."""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from math import e, exp

import numpy as np
import pytest
from scripted_sampler import Scripted, Word, by_name, words

from cartridge_forge.plugins.strategies.answers.text_clusters import text_clusters, tf_idf
from cartridge_forge.plugins.strategies.catalog import parse, run
from cartridge_forge.plugins.strategies.phi import PhiDecoding, sample, weigh, width
from cartridge_forge.plugins.strategies.problem import StrategyResult
from cartridge_forge.protocols.teacher_replay import AgentMessage

ASKED = (AgentMessage("user", "what is it?"),)


def solve(
    strategy: PhiDecoding, script: Mapping[str, Sequence[Word]]
) -> tuple[StrategyResult, Scripted]:
    sampler = Scripted(by_name(script))
    result = asyncio.run(run(strategy, sampler, ASKED, form="rg", seed=7, max_tokens=60))
    return result, sampler


def test_width_keeps_what_is_above_mean_minus_deviation() -> None:
    # Mean -1, deviation 0.707: above -1.707.
    assert width([-0.5, -0.5, -1.0, -2.0]) == [0, 1, 2]
    assert width([-1.0, -1.0, -1.0]) == [0, 1, 2]
    assert width([-3.0]) == [0]


def test_weights_by_advantage_alone() -> None:
    # All in one cluster: its softmax is uniform. 0.1 nats of advantage are one unit.
    found = weigh([0.3, 0.2], [0, 0])
    assert found == pytest.approx([(e / (1 + e) + 0.5) / 2, (1 / (1 + e) + 0.5) / 2])
    assert sum(found) == pytest.approx(1)


def test_weights_by_cluster_alone() -> None:
    found = weigh([0.7] * 4, [0, 1, 0, 0])
    most, least = exp(0.75), exp(0.25)
    total = 3 * most + least
    expected = [(most / total + 0.25) / 2, (least / total + 0.25) / 2]
    assert found == pytest.approx([expected[0], expected[1], expected[0], expected[0]])


def test_equal_candidates_are_drawn_equally_and_never_twice() -> None:
    weights = weigh([0.0] * 4, [0, 0, 1, 1])
    assert weights == pytest.approx([0.25] * 4)
    times: Counter[int] = Counter()
    for seed in range(2000):
        drawn = sample(weights, 2, random.Random(f"phi/{seed}"))
        assert len(set(drawn)) == 2
        times.update(drawn)
    # 1000 of 2000 each, with a standard deviation of 22.
    assert all(900 < times[i] < 1100 for i in range(4))
    assert sample(weights, 9, random.Random("phi")) != [0, 1, 2, 3]
    assert sorted(sample(weights, 9, random.Random("phi"))) == [0, 1, 2, 3]


def test_look_aheads_that_agree_end_the_search() -> None:
    strategy = PhiDecoding(beams=2, rollouts=1, threshold=1.0)
    result, sampler = solve(
        strategy,
        {
            "step/0/0/0": words("one\n\nx"),
            "step/0/1/0": words("two\n\nx"),
            "ahead/0/0/0": words("so it must be <answer>5</answer>", -0.4),
            "ahead/0/1/0": words("<answer>5</answer> of course", -0.2),
        },
    )
    # The second look-ahead is the surer one.
    assert (result.text, result.answer) == ("two\n\n<answer>5</answer> of course", "5")
    assert len(sampler.calls) == 2
    assert [c["advantage"] for c in result.details["log"][0]["candidates"]] == pytest.approx(
        [-0.4, -0.2]
    )
    assert result.details["log"][0]["stopped"] is True


def test_the_largest_cluster_ends_the_search_at_the_threshold() -> None:
    strategy = PhiDecoding(beams=3, rollouts=1, clusters=2, threshold=0.6)
    result, _ = solve(
        strategy,
        {
            **{f"step/0/{i}/0": words(f"{i}\n\nx") for i in range(3)},
            "ahead/0/0/0": words("apples and pears <answer>1</answer>", -0.3),
            "ahead/0/1/0": words("trains never stop here <answer>2</answer>", -0.1),
            "ahead/0/2/0": words("apples and pears <answer>3</answer>", -0.2),
        },
    )
    # Two thirds speak of apples; 2 had the most weight, but stands alone.
    clusters = [c["cluster"] for c in result.details["log"][0]["candidates"]]
    assert clusters == [0, 1, 0]
    assert result.answer == "3"


def test_advantage_is_over_the_look_ahead_before() -> None:
    strategy = PhiDecoding(beams=1, rollouts=3, threshold=1.0, clusters=3, max_steps=2)
    aheads = ["red <answer>1</answer>", "green <answer>2</answer>", "blue <answer>3</answer>"]
    script = {
        **{f"step/{t}/0/{c}": words("x\n\nx") for t in range(2) for c in range(3)},
        **{f"ahead/0/{c}/0": words(a, -0.5) for c, a in enumerate(aheads)},
        **{f"ahead/1/{c}/0": words(a, -0.1 * (c + 1)) for c, a in enumerate(aheads)},
    }
    result, sampler = solve(strategy, script)
    second = result.details["log"][1]["candidates"]
    assert [c["advantage"] for c in second] == pytest.approx([0.4, 0.3, 0.2])
    # One call for the steps of all beams, one for their look-aheads.
    assert [len(c) for c in sampler.calls] == [3, 3, 3, 3]
    assert result.text.startswith("x\n\nx\n\n")


def test_an_unlikely_step_is_not_foreseen() -> None:
    strategy = PhiDecoding(beams=1, rollouts=4, max_steps=1, threshold=1.0)
    script = {
        **{f"step/0/0/{c}": words("x\n\nx", -0.1) for c in range(3)},
        "step/0/0/3": words("y\n\nx", -4.0),
        **{f"ahead/0/{c}/0": words(f"w{c} <answer>{c}</answer>") for c in range(3)},
    }
    _, sampler = solve(strategy, script)
    assert [len(c) for c in sampler.calls] == [4, 3]


def test_an_empty_answer_is_dropped_and_an_end_is_not() -> None:
    strategy = parse(
        "phi_decoding", {"beams": 2, "rollouts": 1, "detector": {"answer_patterns": ["<answer>"]}}
    )
    assert isinstance(strategy, PhiDecoding)
    script = {
        "step/0/0/0": words("so <answer> x"),
        "step/0/1/0": words("so <answer> x"),
        "ahead/0/0/0": words("then <answer>1</answer>", -0.3),
        "ahead/0/1/0": words("then <answer>1</answer>", -0.3),
    }
    result, sampler = solve(strategy, script)
    assert (result.text, result.answer) == ("then <answer>1</answer>", "1")
    assert {a.begun.text for a in sampler.calls[1]} == {""}
    script = {f"step/0/{i}/0": [Word("so <answer"), Word(">", end=True)] for i in range(2)}
    result, sampler = solve(strategy, script)
    # Ended responses are their own look-aheads: nothing more is sampled.
    assert (result.text, result.answer, len(sampler.calls)) == ("so <answer>", None, 1)


def test_the_budget_leaves_the_first_step() -> None:
    script = {f"step/0/{i}/0": words(f"{i}\n\nx") for i in range(2)}
    strategy = PhiDecoding(beams=2, rollouts=1)
    solving = run(
        strategy, Scripted(by_name(script)), ASKED, form="rg", seed=7, max_tokens=60, budget=5
    )
    result = asyncio.run(solving)
    # Two steps of two tokens; two look-aheads do not fit in one.
    assert (result.text, result.finish_reason) == ("0\n\n", "budget")


def test_tf_idf_by_hand() -> None:
    rows = tf_idf(["a a b", "B", ""])
    # Of three texts, "a" is in one and "b" in two.
    a, b = 1 + np.log(4 / 2), 1 + np.log(4 / 3)
    length = np.hypot(2 * a, b)
    assert rows == pytest.approx(np.array([[2 * a / length, b / length], [0, 1], [0, 0]]))


def test_clusters_of_texts() -> None:
    texts = ["a cat sat", "the sum is 4", "a cat sat", "the sum is four", "a cat sat there"]
    for seed in range(10):
        assert text_clusters(texts, 2, random.Random(f"texts/{seed}")) == [0, 1, 0, 1, 0]
    assert text_clusters(["x"] * 4, 3, random.Random("same")) == [0, 0, 0, 0]
    assert text_clusters(["x", "y", "z"], 9, random.Random("more")) == [0, 1, 2]
    assert text_clusters(["", ""], 2, random.Random("empty")) == [0, 0]
    assert text_clusters([], 2, random.Random("none")) == []
