"""Problems and what texts to them are worth: of the clinic, reasoning_gym and verifiers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from environments.clinic.longhealth import PatientQuestion
from environments.problems import ProblemSet, clinic_problem, open_problems
from protocols.rsa import JudgedCandidate
from protocols.spec.rsa import ProblemsSpec

QUESTION = PatientQuestion(
    "patient_01/7", "patient_01", "what is the ecg?",
    ("ulcer", "edema", "cyst", "polyp", "murmur"), "cyst",
)  # fmt: skip

T = TypeVar("T")


def tagged(text: str) -> str | None:
    return text.removeprefix("answer ") if text.startswith("answer ") else None


def over(spec: ProblemsSpec, use: Callable[[ProblemSet], Awaitable[T]]) -> T:
    async def bounded() -> T:
        problems = open_problems(spec, tagged)
        try:
            return await asyncio.wait_for(use(problems), 120)
        finally:
            await problems.close()

    return asyncio.run(bounded())


def test_a_letter_and_its_options_text_are_one_answer() -> None:
    problem = clinic_problem(QUESTION, "be brief")
    assert problem.question.endswith("e) murmur\nbe brief")
    texts = ["the answer is cyst.", "the answer is c.", "the answer is edema.", "hm"]
    judged = over(ProblemsSpec(), lambda p: p.judge(problem, texts))
    assert judged == [
        JudgedCandidate("cyst", 1.0), JudgedCandidate("cyst", 1.0), JudgedCandidate("edema", 0.0),
        JudgedCandidate(None, 0.0),
    ]  # fmt: skip
