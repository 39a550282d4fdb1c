"""Test recursive self-aggregation: its engine, islands, prompts and aggregator."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.strategies.rsa_setup import (
    RIGHT,
    WRONG,
    Scripted,
    accuracies,
    begun,
    majority_copier,
    place,
    scored,
)

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.statistics.intervals import wilson_interval
from cartridge_forge.plugins.strategies.answers.extract import FORMS, extract
from cartridge_forge.plugins.strategies.answers.votes import AnswerVote
from cartridge_forge.plugins.strategies.catalog import parse, run
from cartridge_forge.plugins.strategies.problem import StrategyResult
from cartridge_forge.plugins.strategies.rsa.engine import RSAEngine
from cartridge_forge.plugins.strategies.rsa.islands import RSAShape, draw_parents
from cartridge_forge.plugins.strategies.rsa.populations import (
    AggregationInput,
    JudgedCandidate,
    JudgedPopulation,
    RSAProblem,
    aggregate,
    chosen_of,
    measure,
    reward,
)
from cartridge_forge.plugins.strategies.rsa.prompts import (
    AGGREGATE,
    INSTRUCTIONS,
    REFINE,
    aggregation_prompt,
    as_task,
    opening_prompt,
)
from cartridge_forge.plugins.strategies.rsa.prompts import opening_prompt as opening
from cartridge_forge.plugins.strategies.samplers.sampler import SampleRequest
from cartridge_forge.protocols.errors import DataError


def oracle(right: int) -> Scripted:
    """An aggregator that is right where any of its candidates is."""

    def say(ask: SampleRequest, shown: list[str]) -> str:
        return (RIGHT if RIGHT in shown else WRONG) if shown else begun(ask, right)

    return Scripted(say)


@pytest.mark.parametrize(("n", "k", "right"), [(8, 2, 3), (8, 4, 1), (6, 1, 2), (5, 3, 2)])
def test_an_oracle_gains_what_the_formula_says(n: int, k: int, right: int) -> None:
    """E[p'] = 1 - C(wrong, K) / C(n, K), in the interval of a thousand slots."""
    questions = 150
    first, second = accuracies(oracle(right), questions, N=n, K=k, T=2)
    assert first == right / n
    expected = 1 - comb(n - right, k) / comb(n, k)
    low, high = wilson_interval(round(second * questions * n), questions * n)
    assert low <= expected <= high
    assert high - low < 0.08


def test_once_fewer_than_k_are_wrong_all_are_right() -> None:
    assert accuracies(oracle(2), 20, N=4, K=3, T=4) == [0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("right", "stays"), [(0, 0.0), (6, 1.0)])
def test_all_wrong_and_all_right_absorb(right: int, stays: float) -> None:
    assert accuracies(oracle(right), 5, N=6, K=2, T=5) == [stays] * 5
    assert accuracies(majority_copier(right), 5, N=6, K=3, T=5) == [stays] * 5


def test_a_population_is_one_call_for_all_questions() -> None:
    sampler = oracle(1)
    result = RSAEngine(sampler, M=8, N=2, K=2, T=4, scorer=scored).run(["a?", "b?", "c?"])
    assert [len(batch) for batch in sampler.batches] == [3 * 16] * 4
    spent = result.spent
    assert (spent.calls, spent.asks) == (4, 3 * 16 * 4)
    assert (spent.tokens, spent.prompt_tokens) == (10 * spent.asks, 3 * spent.asks)
    assert spent.seconds > 0
    sampler = oracle(1)
    RSAEngine(sampler, N=16, T=4).run(["a?"], temperature=0.3)
    assert len(sampler.batches) == 4
    assert {a.sampling.temperature for batch in sampler.batches for a in batch} == {0.3}


def test_what_is_recorded_is_what_was_asked_and_said() -> None:
    sampler = Scripted(lambda ask, shown: rf"\boxed{{{place(ask)[2] // 2}}}")
    (only,) = RSAEngine(sampler, N=4, K=2, T=3, seed=1).run(["2 + 2?"]).runs
    assert [p.step for p in only.populations] == [0, 1, 2]
    for population, batch in zip(only.populations, sampler.batches, strict=True):
        assert population.ids == tuple(a.id for a in batch)
        assert population.prompts == tuple(a.messages[-1].content for a in batch)
        assert population.answers == ("0", "0", "1", "1")
        assert population.token_ids == ((1,) * 10,) * 4
    first, second, _ = only.populations
    assert first.parents == ((),) * 4
    for prompt, own in zip(second.prompts, second.parents, strict=True):
        places = [prompt.index(f"Attempt {i}:\n{first.texts[p]}") for i, p in enumerate(own, 1)]
        assert places == sorted(places)
    # Two against two: the earliest speaks. Without a scorer there is an answer, and no metrics.
    assert [vote.traces for vote in only.votes] == [(0, 1), (2, 3)]
    assert (only.chosen, only.answer, only.metrics) == (0, "0", None)
    assert all(p.scores == () for p in only.populations)


def test_equivalent_answers_vote_together_and_missing_ones_not_at_all() -> None:
    says = [r"\boxed{3}", r"\boxed{0.5}", r"\boxed{\frac{1}{2}}", "hm"]
    sampler = Scripted(lambda ask, shown: says[place(ask)[2]])
    (only,) = RSAEngine(sampler, N=4, T=1).run(["?"]).runs
    assert [vote.traces for vote in only.votes] == [(1, 2), (0,)]
    assert only.answer == "0.5"
    (silent,) = RSAEngine(Scripted(lambda ask, shown: "hm"), T=1).run(["?"]).runs
    assert (silent.votes, silent.chosen, silent.answer) == ((), None, None)


def test_metrics_and_reward_by_hand() -> None:
    assert chosen_of([AnswerVote("a", 2.0, (3, 4)), AnswerVote("b", 1.0, (0,))]) == 3
    assert chosen_of([]) is None
    spelled = [AnswerVote("28,080", 3.0, (0, 2, 3)), AnswerVote("5", 1.0, (1,))]
    assert chosen_of(spelled, [0.01, 1.0, None, 1.0]) == 3
    assert chosen_of(spelled, [0.0, 1.0, 0.0, 0.0]) == 0
    scores = [1.0, 0.5, 0.0, 2.0]
    found = measure(scores, 1)
    assert found == {"mean_accuracy": 0.5, "majority_vote": 0.0, "pass_at_n": 1.0}
    assert measure(scores, 3)["majority_vote"] == 1.0
    assert measure([0.9, 0.0], None) == dict.fromkeys(found, 0.0)
    # Three populations of four: mean of all twelve is 0.5.
    populations = [[0.0] * 4, [1.0, 0.5, 0.5, 0.5], scores]
    assert reward(found, "pass_at_n", populations, 0.2) == pytest.approx(1.0 + 0.2 * 0.5)
    assert reward(found, "mean_accuracy", populations) == 0.5


def test_a_budget_ends_a_run_with_the_populations_it_has() -> None:
    """4 x 10 tokens a population: 30 are left for the third, and nothing for a fourth."""
    sampler = oracle(1)
    result = RSAEngine(sampler, N=4, K=2, T=5, budget=110, scorer=scored).run(["a?"])
    (only,) = result.runs
    assert (len(only.populations), only.finish_reason) == (3, "budget")
    assert result.spent.tokens == 40 + 40 + 28  # seven for each of the last: two are left over
    assert only.answer is not None
    nothing = RSAEngine(oracle(1), budget=3).run(["a?"])
    (only,) = nothing.runs
    assert (only.populations, only.answer, only.finish_reason) == ((), None, "budget")
    assert nothing.spent.calls == 0


def test_metrics_are_means_over_questions() -> None:
    def knows_a(ask: SampleRequest, shown: list[str]) -> str:
        return RIGHT if place(ask)[0] == 0 else WRONG

    engine = RSAEngine(Scripted(knows_a), T=2, scorer=scored)
    assert engine.run(["a?", "b?"]).metrics == {
        "mean_accuracy": 0.5, "majority_vote": 0.5, "pass_at_n": 0.5
    }  # fmt: skip
    assert engine.run([]).runs == ()
    with pytest.raises(DataError, match="questions must be a list"):
        engine.run("a?")


def test_the_strategy_keeps_what_stood_before_its_question_and_tells_how_it_came() -> None:
    sampler = oracle(2)
    before = AgentMessage("system", "you are terse")
    messages = (before, AgentMessage("user", "2 + 2?"))
    strategy = parse("rsa", {"N": 4, "K": 3, "T": 2})

    def solve(budget: int | None) -> StrategyResult:
        return asyncio.run(
            run(
                strategy,
                sampler,
                messages,
                form="math",
                seed=1,
                max_tokens=64,
                name="0",
                budget=budget,
            )
        )

    result = solve(None)
    for batch in sampler.batches:
        for asked in batch:
            assert asked.messages[0] == before
            assert asked.messages[1].content.count("2 + 2?") == 1
    assert (result.answer, result.text, result.finish_reason) == ("1", RIGHT, "stop")
    assert result.token_ids == (1,) * 10
    assert (result.spent.tokens, result.spent.calls) == (80, 2)
    assert [len(p["texts"]) for p in result.details["populations"]] == [4, 4]
    assert result.details["votes"] == [{"answer": "1", "weight": 4.0, "traces": [0, 1, 2, 3]}]
    assert json.loads(json.dumps(result.details)) == result.details
    cut, nothing = solve(43), solve(3)
    assert (cut.finish_reason, len(cut.details["populations"])) == ("budget", 1)
    assert (nothing.finish_reason, nothing.answer, nothing.spent.calls) == ("budget", None, 0)
    with pytest.raises(DataError, match="M must be a power of two"):
        asyncio.run(
            run(
                parse("rsa", {"M": 3}),
                sampler,
                messages,
                form="math",
                seed=1,
                max_tokens=64,
                name="0",
            )
        )


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


SHAPE = RSAShape(M=1, N=3, K=2, T=2)
PROBLEM = RSAProblem("sum/1", "primer", "1/4 + 1/4?")
TEXTS = (r"it is \boxed{3}", r"it is \boxed{0.5}", r"\boxed{\frac{1}{2}}")


async def judge(problem: RSAProblem, texts: Sequence[str]) -> list[JudgedCandidate]:
    assert problem == PROBLEM
    return [JudgedCandidate(extract(text, "math"), float("3" not in text)) for text in texts]


def step(number: int, texts: tuple[str, ...] = ()) -> JudgedPopulation:
    standing = AggregationInput("run/0", "rsa/7", PROBLEM, number, texts)
    return asyncio.run(aggregate(standing, SHAPE, "math", judge))


def test_a_run_from_its_first_prompts_to_its_last_judgement() -> None:
    first = step(0)
    assert first == JudgedPopulation(
        (), None, (opening_prompt(PROBLEM.question, "math"),) * 3, ((),) * 3
    )
    second = step(1, TEXTS)
    assert [c.answer for c in second.candidates] == ["3", "0.5", r"\frac{1}{2}"]
    assert [c.score for c in second.candidates] == [0.0, 1.0, 1.0]
    assert second.chosen == 1  # two that are equal outvote one
    assert second.parents == draw_parents(SHAPE, 1, "rsa/7")
    assert second.prompts == tuple(
        aggregation_prompt(PROBLEM.question, [TEXTS[p] for p in own], "math")
        for own in second.parents
    )
    last = step(2, TEXTS)
    assert (last.candidates, last.chosen) == (second.candidates, 1)
    assert (last.prompts, last.parents) == ((), ())
    assert step(2, ("hm", "hm", "hm")).chosen is None


@pytest.mark.parametrize(("number", "texts"), [(0, TEXTS), (1, ()), (2, TEXTS[:2]), (3, TEXTS)])
def test_a_standing_of_another_shape_is_refused(number: int, texts: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match="run/0 stands before population"):
        step(number, texts)


@pytest.mark.parametrize(
    ("task", "asks_for"),
    [("math", r"in \boxed{}."), ("supergpqa", "the letter"), ("rg", "<answer>...</answer>.")],
)
def test_every_prompt_ends_with_the_form_of_the_answer(task: str, asks_for: str) -> None:
    prompts = [
        opening("2 + 2?", as_task(task)),
        aggregation_prompt("2 + 2?", ["4", "5"], as_task(task)),
        aggregation_prompt("2 + 2?", ["4"], as_task(task)),
    ]
    for prompt in prompts:
        assert asks_for in prompt
        assert prompt.endswith(INSTRUCTIONS[as_task(task)])


def test_an_aggregation_says_doubt_then_problem_then_numbered_candidates() -> None:
    prompt = aggregation_prompt("2 + 2?", ["it is 4\n", "it is 5"], "math")
    parts = [AGGREGATE, "Problem:\n2 + 2?", "Attempt 1:\nit is 4", "Attempt 2:\nit is 5"]
    assert prompt.split("\n\n")[:4] == parts
    for needed in ("may be right, wrong", "combine what is useful", "in another way"):
        assert needed in prompt


def test_one_candidate_is_refined() -> None:
    prompt = aggregation_prompt("2 + 2?", ["it is 5"], "general")
    assert prompt.startswith(f"{REFINE}\n\nProblem:\n2 + 2?\n\nAttempt 1:\nit is 5\n\n")
    assert AGGREGATE not in prompt


def test_the_clinic_is_asked_in_its_own_words() -> None:
    said = aggregation_prompt("what is the ecg?", ["the answer is\nulcer.", "ulcer."], "clinic")
    assert said.splitlines() == [
        "what is the ecg?", " review the answers:", " 1: the answer is ulcer.", " 2: ulcer."
    ]  # fmt: skip
    assert opening("what is the ecg?", "clinic") == "what is the ecg?"


def test_tasks_are_the_forms_of_answers() -> None:
    assert set(INSTRUCTIONS) == set(FORMS)
    with pytest.raises(DataError, match=r"task must be one of general, math.*: got 'maths'"):
        as_task("maths")
