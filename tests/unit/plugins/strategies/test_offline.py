"""Chain of thought, self-consistency and DeepConf over scripted traces."""

import asyncio
import json
from collections.abc import Sequence

import pytest
from scripted_sampler import Babbler, Scripted, Word, at, by_name, words

from cartridge_forge.plugins.strategies.answers.extract import Form
from cartridge_forge.plugins.strategies.catalog import Strategy, run
from cartridge_forge.plugins.strategies.deepconf import (
    DeepConf,
    group_confidences,
    token_confidences,
)
from cartridge_forge.plugins.strategies.offline import ChainOfThought, PartVote, SelfConsistency
from cartridge_forge.plugins.strategies.problem import StrategyResult
from cartridge_forge.plugins.strategies.samplers.sampler import ABILITIES, Sampler
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.teacher_replay import AgentMessage

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
