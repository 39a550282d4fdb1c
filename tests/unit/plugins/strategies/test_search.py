"""Test searches, and votes that end early."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from math import exp

import pytest
from scripted_sampler import Babbler, Scripted, Word, by_name, words

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.strategies.adaptive import AdaptiveScaling, Momentum
from cartridge_forge.plugins.strategies.catalog import Strategy, parse, run
from cartridge_forge.plugins.strategies.problem import Judge, StrategyResult
from cartridge_forge.plugins.strategies.samplers.sampler import ABILITIES, Sampler, SampleRequest
from cartridge_forge.plugins.strategies.search import BeamSearch, BestOfN
from cartridge_forge.protocols.errors import DataError

ASKED = (AgentMessage("user", "what is it?"),)


def solve(
    strategy: Strategy, sampler: Sampler, judge: Judge | None = None, budget: int | None = None
) -> StrategyResult:
    solving = run(
        strategy, sampler, ASKED, form="rg", seed=7, max_tokens=60, judge=judge, budget=budget
    )
    result = asyncio.run(solving)
    assert json.loads(json.dumps(result.details, allow_nan=False)) == result.details
    return result


def rewards(scores: Mapping[str, float]) -> Judge:
    """A judge that knows a step by its first word."""

    async def judge(texts: Sequence[str]) -> list[float]:
        return [scores[t.rstrip().rpartition("\n\n")[2].split()[0]] for t in texts]

    return judge


def by_path(script: Mapping[str, Sequence[str]]) -> Scripted:
    """Candidates by the first words of the steps before: "a/b" after "a ..\\n\\nb ..\\n\\n"."""

    def find(ask: SampleRequest) -> list[Word]:
        place = "/".join(s.split()[0] for s in ask.begun.text.split("\n\n") if s)
        return words(script[place][int(ask.id.rpartition("/")[2])])

    return Scripted(find)


# Greedy takes a (0.6), whose best is c: 0.6 and 0.1. Behind b (0.5) is d with 0.9.
GARDEN = {
    "": ("a is it\n\nx", "b is it\n\nx"),
    "a": ("c <answer>1</answer>", "c <answer>2</answer>"),
    "b": ("e <answer>3</answer>", "d <answer>4</answer>"),
}
WORTH = {"a": 0.6, "b": 0.5, "c": 0.1, "d": 0.9, "e": 0.2}


def test_greedy_fails_where_two_beams_win() -> None:
    options = {"scorer": "process_reward", "candidates": 2}
    greedy = solve(parse("best_of_n", options), by_path(GARDEN), rewards(WORTH))
    assert (greedy.answer, greedy.text) == ("1", "a is it\n\nc <answer>1</answer>")
    sampler = by_path(GARDEN)
    found = solve(parse("beam_search", {**options, "beams": 2}), sampler, rewards(WORTH))
    assert (found.answer, found.finish_reason) == ("4", "until")
    # One call a step for all candidates of all beams.
    assert sampler.names == [
        ["step/0/0/0", "step/0/0/1"],
        ["step/1/0/0", "step/1/0/1", "step/1/1/0", "step/1/1/1"],
    ]
    assert [s["score"] for s in found.details["steps"]] == [0.5, 0.9]
    spent = found.spent
    # Each first step is "a", "is", "it" and the blank line; each answer ends with its second word.
    assert (spent.tokens, spent.calls, spent.asks) == (2 * 4 + 4 * 2, 2, 6)
    text = "b is it\n\nd <answer>4</answer>"
    assert found.token_ids == tuple(w.id for w in words(text, end=False))


@pytest.mark.parametrize(
    ("aggregate", "answer"),
    [
        # Of (0.6, 0.1), (0.5, 0.2), (0.5, 0.9) and (0.6, 0.2):
        ("last", "4"),
        ("mean", "4"),
        ("sum", "4"),
        ("product", "4"),
        ("min", "4"),
        ("max", "4"),
    ],
)
def test_every_aggregate_finds_the_best_pair(aggregate: str, answer: str) -> None:
    strategy = parse(
        "beam_search", {"scorer": "process_reward", "candidates": 2, "aggregate": aggregate}
    )
    assert solve(strategy, by_path(GARDEN), rewards(WORTH)).answer == answer


@pytest.mark.parametrize(
    ("aggregate", "answer"),
    # Scores (0.9, 0.1, 0.8) for 1 and (0.5, 0.5, 0.5) for 2: sums 1.8 and 1.5, products 0.072 and
    # 0.125; 3 has (0.5, 0.5, 0.85): sum 1.85, product 0.2125.
    [("last", "3"), ("mean", "3"), ("product", "3"), ("min", "2"), ("max", "1")],
)
def test_aggregates_differ(aggregate: str, answer: str) -> None:
    garden = {
        "": ("a\n\nx", "b\n\nx"),
        "a": ("c\n\nx", "c\n\nx"),
        "b": ("d\n\nx", "d\n\nx"),
        "a/c": ("e <answer>1</answer>", "f"),
        "b/d": ("g <answer>2</answer>", "h <answer>3</answer>"),
    }
    worth = {"a": 0.9, "b": 0.5, "c": 0.1, "d": 0.5, "e": 0.8, "f": 0.0, "g": 0.5, "h": 0.85}
    strategy = parse(
        "beam_search",
        {"scorer": "process_reward", "candidates": 2, "aggregate": aggregate, "beams": 4},
    )
    assert solve(strategy, by_path(garden), rewards(worth)).answer == answer


def test_one_beam_equals_best_of_n() -> None:
    for seed in range(20):
        found = [
            asyncio.run(run(s, Babbler(), ASKED, form="general", seed=seed, max_tokens=40))
            for s in (BestOfN(candidates=3), BeamSearch(beams=1, candidates=3, aggregate="last"))
        ]
        first, second = ((r.text, r.token_ids, r.answer, r.finish_reason) for r in found)
        assert first == second
        assert found[0].details == found[1].details


def test_an_answer_pattern_with_nothing_behind_it_is_dropped() -> None:
    """Its step goes, and final answers are sampled from before it."""
    detector = {"answer_patterns": ["<answer>"]}
    script = {
        "step/0/0/0": words("a is it\n\nx"),
        "step/0/0/1": words("b is it\n\nx", -0.5),
        "step/1/0/0": words("so <answer> 9", -0.2),
        "step/1/0/1": words("and <answer> 8", -0.3),
        "final/1/0/0": words("so <answer>1</answer>", -0.4),
        "final/1/0/1": words("then <answer>2</answer>", -0.3),
    }
    sampler = Scripted(by_name(script))
    result = solve(parse("best_of_n", {"candidates": 2, "detector": detector}), sampler)
    # "so" was the better step, but "then" is the better answer. The dropped step is not in it.
    assert result.text == "a is it\n\nthen <answer>2</answer>"
    assert (result.answer, result.finish_reason) == ("2", "stop")
    said = [*words("a is it\n\n", end=False), *words("then <answer>2</answer>")]
    assert result.token_ids == tuple(w.id for w in said)
    (ask, _) = sampler.calls[-1]
    assert (ask.begun.text, ask.until) == ("a is it\n\n", None)
    assert ask.begun.token_ids == tuple(w.id for w in words("a is it\n\n", end=False))


def test_beam_search_gives_every_empty_answer_a_final_one_in_one_call() -> None:
    detector = {"answer_patterns": ["<answer>"]}
    script = {
        "step/0/0/0": words("so <answer> 9", -0.1),
        "step/0/0/1": words("and <answer> 8", -0.2),
        "final/0/0/0": words("<answer>1</answer>", -0.5),
        "final/0/0/1": words("<answer>2</answer>", -0.6),
        "final/0/1/0": words("<answer>3</answer>", -0.4),
        "final/0/1/1": words("<answer>4</answer>", -0.7),
    }
    sampler = Scripted(by_name(script))
    strategy = parse("beam_search", {"candidates": 2, "beams": 2, "detector": detector})
    result = solve(strategy, sampler)
    assert (result.answer, result.text) == ("3", "<answer>3</answer>")
    assert [len(c) for c in sampler.calls] == [2, 4]


def test_a_genuine_end_is_never_dropped() -> None:
    detector = {"answer_patterns": ["<answer>"]}
    script = {"step/0/0/0": [Word("so <answer"), Word("", end=True)]}
    sampler = Scripted(by_name(script))
    result = solve(parse("best_of_n", {"candidates": 1, "detector": detector}), sampler)
    assert (result.text, result.finish_reason, len(sampler.calls)) == ("so <answer", "stop", 1)
    # Even where the pattern is the last that is said: here the end token comes first.
    script = {"step/0/0/0": [Word("<answer"), Word(">", end=True)]}
    result = solve(
        parse("best_of_n", {"candidates": 1, "detector": detector}), Scripted(by_name(script))
    )
    assert (result.text, result.finish_reason, result.answer) == ("<answer>", "stop", None)


def test_after_the_last_step_comes_a_final_answer() -> None:
    script = {
        "step/0/0/0": words("a\n\nx"),
        "step/1/0/0": words("b\n\nx"),
        "final/0/0": words("c <answer>5</answer>"),
    }
    sampler = Scripted(by_name(script))
    result = solve(parse("best_of_n", {"candidates": 1, "max_steps": 2}), sampler)
    assert (result.text, result.answer) == ("a\n\nb\n\nc <answer>5</answer>", "5")


def test_the_budget_ends_the_search_with_what_it_has() -> None:
    sampler = by_path(GARDEN)
    options = {"scorer": "process_reward", "candidates": 2}
    # Two steps of four tokens, and one token for two more.
    result = solve(parse("best_of_n", options), sampler, rewards(WORTH), budget=9)
    assert (result.text, result.answer, result.finish_reason) == ("a is it\n\n", None, "budget")
    assert (result.spent.tokens, result.spent.calls) == (8, 1)
    # Two steps of three tokens: they were cut short, and end there.
    result = solve(parse("best_of_n", options), sampler, rewards(WORTH), budget=6)
    assert (result.text, result.finish_reason, result.spent.tokens) == ("a is it", "budget", 6)


def test_a_judge_that_is_sampled_spends_of_the_same_budget() -> None:
    place = (("+", -0.1), ("-", -2.5))
    judge = Scripted(lambda ask: [Word("+", -0.1, place)])
    strategy = parse("best_of_n", {"scorer": "process_reward", "candidates": 2})
    solving = run(
        strategy, by_path(GARDEN), ASKED, form="rg", seed=7, max_tokens=60, judge=judge, budget=99
    )
    result = asyncio.run(solving)
    assert [len(c) for c in judge.calls] == [2, 2]
    assert (result.spent.tokens, result.spent.calls) == (2 * 4 + 2 * 2 + 4, 4)


def test_online_strategies_tell_a_black_box_before_they_sample() -> None:
    for name in ("best_of_n", "beam_search", "phi_decoding", "adaptive_scaling"):
        for ability in ("continue", "until", "logprobs"):
            sampler = Scripted(by_name({}), ABILITIES - {ability})
            with pytest.raises(DataError, match=rf"{name} needs .* {ability}"):
                solve(parse(name), sampler)
            assert sampler.calls == []


def scaled(uncertainties: list[float], *, corrected: bool = False) -> list[int]:
    """The steps that are scaled."""
    momentum, found = Momentum(0.9, 0.9, corrected), []
    for t, u in enumerate(uncertainties):
        if momentum.scales(u):
            # The rule as it is written.
            assert corrected or exp(momentum.value) / 0.9 < exp(u)
            found.append(t)
        momentum = momentum.after(u)
    return found


def test_a_constant_uncertainty_is_scaled_while_the_momentum_lags() -> None:
    assert scaled([0.3] * 30) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert scaled([0.1] * 30) == []
    assert scaled([0.3] * 30, corrected=True) == []
    # Once it has caught up, a step must be less sure than usual by -ln 0.9 = 0.105.
    assert scaled([0.2] * 8 + [0.31, 0.2, 0.28], corrected=True) == [8]


def test_momentum_is_a_running_mean() -> None:
    momentum = Momentum(0.9, 0.9, False).after(1.0).after(0.5)
    assert momentum.value == pytest.approx(0.9 * 0.1 + 0.1 * 0.5)
    assert momentum.steps == 2


def steps(ask: SampleRequest) -> list[Word]:
    """Probes of uncertainty 0.3, and of other candidates the second is the best."""
    kind, t, _, c = ask.id.split("/")[1:]
    if kind == "probe":
        return words(f"probe{t}\n\nx", -0.3)
    return words(f"more{t}\n\nx", -0.2 if c == "1" else -0.4)


def adaptive_solve(strategy: AdaptiveScaling, sampler: Scripted) -> StrategyResult:
    return asyncio.run(run(strategy, sampler, ASKED, form="rg", seed=7, max_tokens=60))


def test_scaled_steps_take_the_best_candidate() -> None:
    sampler = Scripted(lambda a: words("<answer>1</answer>") if "final" in a.id else steps(a))
    result = adaptive_solve(AdaptiveScaling(candidates=3, max_steps=11), sampler)
    # Steps 0 and 10 keep their probe.
    assert result.text == "".join(
        [
            "probe0\n\n",
            *(f"more{t}\n\n" for t in range(1, 10)),
            "probe10\n\n",
            "<answer>1</answer>",
        ]
    )
    assert [entry["scaled"] for entry in result.details["log"]] == [False] + [True] * 9 + [False]
    # Eleven probes, nine calls for two more, and three final answers.
    assert (result.spent.calls, result.spent.asks) == (11 + 9 + 1, 11 + 18 + 3)
    lean = Scripted(sampler.script)
    adaptive_solve(AdaptiveScaling(candidates=3, max_steps=11, momentum="bias_corrected"), lean)
    assert len(lean.calls) == 12


def test_an_empty_answer_is_dropped_here_too() -> None:
    strategy = parse(
        "adaptive_scaling", {"candidates": 2, "detector": {"answer_patterns": ["<answer>"]}}
    )
    script = {
        "probe/0/0/0": words("a\n\nx", -0.1),
        "probe/1/0/0": words("so <answer> x", -0.1),
        "final/0/0": words("b <answer>1</answer>", -0.5),
        "final/0/1": words("c <answer>2</answer>", -0.2),
    }
    result = adaptive_solve(strategy, Scripted(by_name(script)))  # type: ignore[arg-type]
    assert (result.text, result.answer) == ("a\n\nc <answer>2</answer>", "2")
    script["probe/1/0/0"] = [Word("so <answer"), Word(">", end=True)]
    result = adaptive_solve(strategy, Scripted(by_name(script)))  # type: ignore[arg-type]
    assert (result.text, result.answer, result.finish_reason) == ("a\n\nso <answer>", None, "stop")


def test_the_budget_leaves_the_probe() -> None:
    sampler = Scripted(steps)
    solving = run(
        AdaptiveScaling(candidates=4), sampler, ASKED, form="rg", seed=7, max_tokens=60, budget=6
    )
    result = asyncio.run(solving)
    # Two probes of two tokens; three more candidates do not fit in two tokens.
    assert (result.text, result.finish_reason) == ("probe0\n\nprobe1\n\n", "budget")
