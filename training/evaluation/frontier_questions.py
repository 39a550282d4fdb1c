"""Make the questions that strategies are compared on, with the records of their answers.

options    a run's held-out option questions, right by their letter or its text
findings   questions of several fields of a chart of the embedded clinic, right if all are
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from environments.clinic.findings import (
    FindingsQuestion,
    all_right,
    draw_findings,
    part_list,
    said_parts,
)
from environments.clinic.longhealth import Patient
from protocols.records.answers import Answer, hash_of
from training.recipes.longhealth_prompts import LongHealthPrompts, LongHealthQuestion
from training.recipes.study_prompts import in_turns, titled


@dataclass(frozen=True)
class FrontierQuestion:
    """Hold a question about `document` as every arm is asked it. `record(text, tokens)` returns the
    record of an answer, judged."""

    id: str
    document: str
    text: str
    record: Callable[[str, int], Answer]


def option_questions(tasks: LongHealthPrompts, most: int) -> list[FrontierQuestion]:
    """Return the first `most` of a run's held-out option questions."""

    def record(exam: LongHealthQuestion, text: str, tokens: int) -> Answer:
        (answer,) = tasks.answers([exam], [text], [tokens])
        return answer

    return [
        FrontierQuestion(e.question.id, e.question.patient, e.text, partial(record, e))
        for e in tasks.exams[:most]
    ]


def findings_questions(
    tasks: LongHealthPrompts, parts: int, count: int, seed: int
) -> list[FrontierQuestion]:
    """Return `count` questions of `parts` fields each, patients in turn. Raises DataError for
    charts that have too few facts, or are not the embedded clinic's."""
    each = -(-count // len(tasks.patients))
    rows = [
        [(patient, q) for q in draw_findings(patient, parts, each, seed)]
        for _, patient in sorted(tasks.patients.items())
    ]
    found = []
    for patient, question in in_turns(rows)[:count]:
        text = titled(tasks.titles, patient.id, question.text)
        cartridge = tasks.layout.cartridge_of(patient.id)
        record = partial(findings_answer, question, patient, cartridge)
        found.append(FrontierQuestion(question.id, patient.id, text, record))
    return found


def findings_answer(
    question: FindingsQuestion, patient: Patient, cartridge: str, text: str, tokens: int
) -> Answer:
    """Return the record of a response; its answer is the list of the parts that it gives."""
    said = said_parts(text)
    return Answer(
        id=question.id, fact=question.text, document=patient.id,
        document_hash=hash_of(patient.document),
        question_hash=hash_of(question.text, question.correct), text=text,
        answer=part_list(said) or None, expected=question.correct,
        right=float(all_right(question.parts, said)), tokens=tokens, cartridge=cartridge,
    )  # fmt: skip
