"""Make the questions that strategies are compared on, with the records of their answers.

options    a run's held-out option questions, right by their letter or its text
findings   questions of several fields of one or more charts of the embedded clinic, right if all
           are
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cartridge_forge.plugins.clinic.findings import (
    FindingsQuestion,
    all_right,
    draw_findings,
    part_list,
    said_parts,
)
from cartridge_forge.plugins.clinic.longhealth import Patient
from cartridge_forge.plugins.documents.study.longhealth_prompts import (
    LongHealthPrompts,
    LongHealthQuestion,
)
from cartridge_forge.plugins.documents.study.prompts import interleave, with_title
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.records.answers import Answer, hash_of


@dataclass(frozen=True)
class FrontierQuestion:
    """Hold a question about `documents` as every arm is asked it. `record(text, tokens)` returns
    the record of an answer, judged."""

    id: str
    documents: tuple[str, ...]
    text: str
    record: Callable[[str, int], Answer]


def option_questions(tasks: LongHealthPrompts, most: int) -> list[FrontierQuestion]:
    """Return the first `most` of a run's held-out option questions."""

    def record(exam: LongHealthQuestion, text: str, tokens: int) -> Answer:
        (answer,) = tasks.answers([exam], [text], [tokens])
        return answer

    return [
        FrontierQuestion(e.question.id, (e.question.patient,), e.text, partial(record, e))
        for e in tasks.exams[:most]
    ]


def findings_questions(
    tasks: LongHealthPrompts, parts: int, charts: int, count: int, seed: int
) -> list[FrontierQuestion]:
    """Return `count` questions of `parts` fields of `charts` patients each, one group of patients
    after another. Raises DataError for charts that are too few, have too few facts, or are not the
    embedded clinic's."""
    patients = [patient for _, patient in sorted(tasks.patients.items())]
    if len(patients) < charts:
        raise DataError(
            f"questions of {charts} charts need as many: the run has {len(patients)}; lower "
            "frontier.charts, or raise data.patients"
        )
    starts = range(0, len(patients) - charts + 1, charts)
    per_start = -(-count // len(starts))
    rows = [
        [(group, question) for question in draw_findings(group, parts, per_start, seed)]
        for group in (patients[start : start + charts] for start in starts)
    ]
    questions = []
    for group, question in interleave(rows)[:count]:
        # A name leads a reader of one chart; a question of several names none of them.
        text = (
            with_title(tasks.titles, group[0].id, question.text) if charts == 1 else question.text
        )
        cartridges = [tasks.layout.cartridge_of(patient.id) for patient in group]
        record = partial(findings_answer, question, group, cartridges)
        questions.append(FrontierQuestion(question.id, question.patients, text, record))
    return questions


def findings_answer(
    question: FindingsQuestion,
    patients: Sequence[Patient],
    cartridges: Sequence[str],
    text: str,
    tokens: int,
) -> Answer:
    """Return the record of a response; its answer is the list of the parts that it gives."""
    named_parts = said_parts(text)
    return Answer(
        id=question.id, fact=question.text, document="+".join(question.patients),
        document_hash=hash_of(*(patient.document for patient in patients)),
        question_hash=hash_of(question.text, question.correct), text=text,
        answer=part_list(named_parts) or None, expected=question.correct,
        right=float(all_right(question.parts, named_parts)), tokens=tokens,
        cartridge="+".join(cartridges),
    )  # fmt: skip
