"""Test aggregation and its prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cartridge_forge.plugins.strategies.answers.extract import FORMS, extract
from cartridge_forge.plugins.strategies.rsa.islands import RSAShape, draw_parents
from cartridge_forge.plugins.strategies.rsa.populations import (
    AggregationInput,
    JudgedCandidate,
    JudgedPopulation,
    RSAProblem,
    aggregate,
)
from cartridge_forge.plugins.strategies.rsa.prompts import (
    AGGREGATE,
    INSTRUCTIONS,
    REFINE,
    aggregation_prompt,
    as_task,
    opening_prompt,
)
from cartridge_forge.plugins.strategies.rsa.prompts import (
    opening_prompt as opening,
)
from cartridge_forge.protocols.errors import DataError

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
