"""Test strategies over recorded candidates, and phi."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from math import e, exp

import numpy as np
import pytest
from scripted_sampler import Babbler, Scripted, Word, at, by_name, words

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.strategies.answers.extract import Form
from cartridge_forge.plugins.strategies.answers.votes import text_clusters, tf_idf
from cartridge_forge.plugins.strategies.catalog import Strategy, parse, run
from cartridge_forge.plugins.strategies.deepconf import (
    DeepConf,
    group_confidences,
    token_confidences,
)
from cartridge_forge.plugins.strategies.offline import ChainOfThought, PartVote, SelfConsistency
from cartridge_forge.plugins.strategies.phi import PhiDecoding, sample, weigh, width
from cartridge_forge.plugins.strategies.problem import StrategyResult
from cartridge_forge.plugins.strategies.samplers.sampler import ABILITIES, Sampler
from cartridge_forge.protocols.errors import DataError

ASKED = (AgentMessage("user", "what is it?"),)


def solve(strategy: Strategy, sampler: Sampler, form: Form = "math") -> StrategyResult:
    result = asyncio.run(run(strategy, sampler, ASKED, form=form, seed=7, max_tokens=100))
    assert json.loads(json.dumps(result.details, allow_nan=False)) == result.details
    return result


def box(answer: str) -> list[Word]:
    return words(f"so \\boxed{{{answer}}}")


def traces(*said: Sequence[Word]) -> Scripted:
    return Scripted(by_name({str(i): s for i, s in enumerate(said)}))


def test_chain_of_thought_is_one_response() -> None:
    sampler = traces(box("4"))
    result = solve(ChainOfThought(), sampler)
    assert (result.text, result.answer, result.finish_reason) == ("so \\boxed{4}", "4", "stop")
    assert result.token_ids == tuple(w.id for w in box("4"))
    spent = result.spent
    assert (spent.tokens, spent.prompt_tokens, spent.calls, spent.asks) == (3, 3, 1, 1)
    assert spent.seconds > 0


def test_self_consistency_votes_by_equivalence_in_one_call() -> None:
    sampler = traces(words("no idea"), box("3"), box("0.5"), box("\\frac12"), words("none"))
    result = solve(SelfConsistency(samples=5), sampler)
    assert (result.answer, result.text) == ("0.5", "so \\boxed{0.5}")
    assert result.details["votes"] == [
        {"answer": "0.5", "weight": 2.0, "traces": [2, 3]},
        {"answer": "3", "weight": 1.0, "traces": [1]},
    ]
    assert (result.spent.calls, result.spent.asks) == (1, 5)


def test_self_consistency_without_any_answer_has_none() -> None:
    result = solve(SelfConsistency(samples=2), traces(words("no idea"), words("none")))
    assert (result.answer, result.text, result.details["votes"]) == (None, "no idea", [])


def test_part_vote_chooses_every_part_by_itself() -> None:
    """No response has all parts; the mri is not asked for, and the ecg has one vote a value."""
    sampler = traces(
        words("the answer is ecg edema, sodium 41 mmol, surgeon weber."),
        words("the answer is sodium 41 mmol, ecg normal, mri cyst."),
        words("no idea"),
        words("the answer is surgeon weber, sodium 9 mmol."),
        words("the answer is surgeon costa, surgeon weber."),
    )
    asked = (AgentMessage("user", "what is the sodium? what is the surgeon? what is the ecg?"),)
    result = asyncio.run(
        run(PartVote(samples=5), sampler, asked, form="clinic", seed=7, max_tokens=100)
    )
    assert result.answer == "sodium 41 mmol, surgeon weber, ecg edema"
    assert result.text == f"the answer is {result.answer}."
    assert (result.finish_reason, result.token_ids) == ("stop", ())
    assert result.details["votes"] == {
        "sodium": {"41 mmol": 2, "9 mmol": 1},
        "surgeon": {"weber": 2, "costa": 1},
        "ecg": {"edema": 1, "normal": 1},
    }
    assert (result.spent.calls, result.spent.asks) == (1, 5)


def test_part_vote_without_a_part_has_no_answer() -> None:
    result = solve(PartVote(samples=2), traces(words("no idea"), box("4")))
    assert (result.answer, result.text, result.details["votes"]) == (None, "no idea", {})


# Confidences of the tokens "so", "so", the box and the end. Windows of two.
#            mean   tail   lowest group
# 1: 8 0 2 6   4      4       1
# 2: 3 3 3 3   3      3       3
# 3: 0 0 5 7   3      6       0
VOTERS = [
    at([8, 0, 2, 6], "so so \\boxed{1}"),
    at([3, 3, 3, 3], "so so \\boxed{2}"),
    at([0, 0, 5, 7], "so so \\boxed{3}"),
]


@pytest.mark.parametrize(
    ("measure", "answer", "weight"), [("mean", "1", 4), ("lowest_group", "2", 3), ("tail", "3", 6)]
)
def test_deepconf_measures_choose_differently(measure: str, answer: str, weight: float) -> None:
    strategy = DeepConf(traces=3, measure=measure, window=2, keep_fraction=0.3)  # type: ignore[arg-type]
    result = solve(strategy, traces(*VOTERS))
    assert result.answer == answer
    assert result.details["votes"] == [
        {"answer": answer, "weight": weight, "traces": [int(answer) - 1]}
    ]


def test_deepconf_weighs_votes_by_confidence() -> None:
    pair = [at([2, 2, 2, 2], "so so \\boxed{5}"), at([2, 2, 2, 2], "so so \\boxed{5.0}")]
    strategy = DeepConf(traces=5, measure="mean", window=2, keep_fraction=1.0)
    result = solve(strategy, traces(*VOTERS, *pair))
    # 1 has 4, 2 and 3 have 3 each, and 5 twice 2: equal to 1, which came first.
    assert [(v["answer"], v["weight"]) for v in result.details["votes"]] == [
        ("1", 4.0), ("5", 4.0), ("2", 3.0), ("3", 3.0),
    ]  # fmt: skip
    # Half of the traces: 1, and of 2 and 3 the earlier ones.
    half = solve(
        DeepConf(traces=5, measure="mean", window=2, keep_fraction=0.5), traces(*VOTERS, *pair)
    )
    assert half.details["kept"] == [0, 1, 2]


def test_deepconf_online_stops_at_the_first_full_window_below_the_threshold() -> None:
    warm = [at([3, 3, 3, 3], "so so \\boxed{1}"), at([1, 5, 1, 5], "so so \\boxed{1}")]
    # Lowest groups of two: 3 and 3. Kept: the first; s = 3.
    further = at([0, 6, 3, 2.5, 9, 9], "a b c d \\boxed{2}")
    # Windows: 3, 4.5, 2.75: the third is the first below 3. The single 0 is no full window.
    steady = at([3, 3, 3, 3], "so so \\boxed{2}")  # equal to s is not below
    strategy = DeepConf(mode="online", traces=4, warmup=2, window=2, keep_fraction=0.5)
    sampler = traces(*warm, further, steady)
    result = solve(strategy, sampler)
    assert sampler.names == [["0", "1"], ["2", "3"]]
    assert result.details["threshold"] == 3.0
    assert [t["tokens"] for t in result.details["traces"]] == [4, 4, 4, 4]
    assert [t["stopped"] for t in result.details["traces"]] == [False, False, True, False]
    assert result.details["kept"] == [0, 1, 3]
    assert result.details["votes"][0] == {"answer": "1", "weight": 6.0, "traces": [0, 1]}


def test_deepconf_online_equals_offline_on_the_same_traces() -> None:
    """A trace is stopped where, and only where, a group of the whole trace is below s."""
    online = DeepConf(mode="online", traces=24, warmup=8, window=3, keep_fraction=0.5)
    streamed = solve(online, Babbler(), "general")
    whole = Babbler()
    solve(DeepConf(traces=24, window=3), whole, "general")
    floor = streamed.details["threshold"]
    stopped = 0
    for ask, trace in list(zip(whole.calls[0], streamed.details["traces"], strict=True))[8:]:
        said = whole.script(ask)
        groups = group_confidences(token_confidences([w.top for w in said], 20), 3)
        below = [i for i, g in enumerate(groups) if g < floor] if len(said) >= 3 else []
        # The end token ends a trace whatever its confidence.
        expected = below[0] + 3 if below and below[0] + 3 < len(said) else len(said)
        assert trace["tokens"] == expected
        stopped += trace["stopped"]
    assert 0 < stopped < 16


def test_deepconf_consensus_stops_when_the_leader_cannot_be_overtaken() -> None:
    same = at([2, 2, 2, 2], "so so \\boxed{1}")
    other = at([2, 2, 2, 2], "so so \\boxed{2}")
    strategy = DeepConf(
        mode="online", traces=8, warmup=3, window=2, keep_fraction=1.0, consensus=True, batch=2
    )
    # After 3: 6 for the leader, 5 traces of weight 2 to come. After 5: 10 against 6 to come.
    sampler = traces(*[same] * 8)
    result = solve(strategy, sampler)
    assert sampler.names == [["0", "1", "2"], ["3", "4"]]
    assert result.details["consensus"] is True
    # After 5: 8 - 2 = 6 is not more than 3 * 2; after 7 it is decided.
    sampler = traces(*[same] * 4, other, *[same] * 3)
    solve(strategy, sampler)
    assert [len(c) for c in sampler.calls] == [3, 2, 2]


def test_deepconf_votes_with_what_the_budget_left() -> None:
    warm = [at([3, 3, 3, 3], "so so \\boxed{1}")] * 2
    strategy = DeepConf(mode="online", traces=8, warmup=2, window=2, keep_fraction=0.5)
    result = asyncio.run(
        run(strategy, traces(*warm), ASKED, form="math", seed=7, max_tokens=9, budget=12)
    )
    # Eight tokens of warm-up; six more traces do not fit in four.
    assert (result.answer, result.finish_reason, result.spent.tokens) == ("1", "budget", 8)


def test_deepconf_tells_a_black_box_before_it_samples() -> None:
    blind = Scripted(by_name({}), frozenset({"seed"}))
    with pytest.raises(DataError, match=r"deepconf needs .* top_logprobs"):
        solve(DeepConf(), blind)
    told = Scripted(by_name({}), ABILITIES - {"confidence"})
    with pytest.raises(DataError, match=r"deepconf \(online\) needs .* confidence"):
        solve(DeepConf(mode="online"), told)
    assert blind.calls == told.calls == []


def phi_solve(
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
    result, sampler = phi_solve(
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
    result, _ = phi_solve(
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
    result, sampler = phi_solve(strategy, script)
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
    _, sampler = phi_solve(strategy, script)
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
    result, sampler = phi_solve(strategy, script)
    assert (result.text, result.answer) == ("then <answer>1</answer>", "1")
    assert {a.begun.text for a in sampler.calls[1]} == {""}
    script = {f"step/0/{i}/0": [Word("so <answer"), Word(">", end=True)] for i in range(2)}
    result, sampler = phi_solve(strategy, script)
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
