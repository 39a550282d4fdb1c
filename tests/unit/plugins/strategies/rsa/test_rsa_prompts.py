"""What recursive self-aggregation asks."""

from __future__ import annotations

import pytest

from cartridge_forge.plugins.strategies.answers.extract import FORMS
from cartridge_forge.plugins.strategies.rsa.prompts import (
    AGGREGATE,
    INSTRUCTIONS,
    REFINE,
    aggregation_prompt,
    as_task,
)
from cartridge_forge.plugins.strategies.rsa.prompts import opening_prompt as opening
from cartridge_forge.protocols.errors import DataError


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
