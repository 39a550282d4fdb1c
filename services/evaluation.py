"""Scoring the arms on held-out questions."""

from __future__ import annotations

from collections.abc import Sequence

from clinic.prompts import parse_answer
from protocols.intervals import wilson_interval
from protocols.records import Measured
from services.tasks import Exam


def measure(exams: Sequence[Exam], answers: Sequence[str]) -> Measured:
    """Accuracy over all questions with its 95% Wilson interval; unparsed answers count as wrong."""
    letters = [parse_answer(a, e.question) for e, a in zip(exams, answers, strict=True)]
    right = sum(
        letter is not None and e.question.is_correct(letter)
        for e, letter in zip(exams, letters, strict=True)
    )
    low, high = wilson_interval(right, len(exams))
    return Measured(
        accuracy=right / len(exams),
        ci95=[low, high],
        n=len(exams),
        parse_failures=sum(letter is None for letter in letters),
    )
