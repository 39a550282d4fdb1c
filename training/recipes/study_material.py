"""Open what a run studies by itself: a user's files, or LongHealth's charts and their questions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from documents.corpus import Corpus, corpus_of, read_parts
from documents.reading import ReadResult, UserDocument
from environments.clinic.longhealth import Patient, is_held_out
from environments.clinic.prompts import option_prompt
from protocols.errors import DataError
from protocols.spec.learn import LearnSpec
from training.recipes.longhealth import in_turns, read_patients
from training.recipes.question_files import UserQuestion, read_questions


def read_material(spec: LearnSpec, tokenizer: Any) -> tuple[Corpus, list[UserQuestion]]:
    """Return the documents, and the questions that decide the accuracy, the documents in turn:
    those of data.questions, or LongHealth's held-out ones.

    Raises DataError for documents or questions that cannot be read or used.
    """
    if spec.data.source == "longhealth":
        patients = read_patients(spec.data)
        return chart_corpus(spec, patients, tokenizer), held_out_questions(spec, patients)
    corpus = read_parts(spec, tokenizer)
    if spec.data.questions is None:
        return corpus, []
    found = read_questions(spec.data.questions, corpus.texts, spec.data.instruction)
    return corpus, in_turns([[q for q in found if q.document == name] for name in corpus.parts])


def chart_corpus(spec: LearnSpec, patients: Sequence[Patient], tokenizer: Any) -> Corpus:
    """Return the patients' charts, each with its first line as `about`.

    Raises DataError where a chart is too long for the model, no longer than a cartridge, or has one
    of the model's special tokens: its questions would then have no cartridge.
    """
    corpus = corpus_of(spec, charts(patients, spec.data.path), tokenizer)
    lacking = [p.id for p in patients if p.id not in corpus.parts]
    if lacking:
        listed = "".join(f"\n  {item}" for item in (*corpus.left_out, *corpus.notes))
        raise DataError(
            f"the questions about {', '.join(lacking)} need a cartridge of the whole chart; lower "
            f"data.patients, or train.row_tokens, or give a model that reads more{listed}"
        )
    heads = {p.id: p.document.partition("\n")[0] for p in patients}
    parts = {name: replace(part, about=heads[name]) for name, part in corpus.parts.items()}
    return replace(corpus, parts=parts)


def charts(patients: Sequence[Patient], source: str | None) -> ReadResult:
    """Return the patients' charts as documents; `source` is the file or URL they are from."""
    found = []
    for p in patients:
        digest = hashlib.sha256(p.document.encode()).hexdigest()
        found.append(UserDocument(p.id, f"{source}#{p.id}", p.document, digest, "utf-8"))
    return ReadResult(tuple(found))


def held_out_questions(spec: LearnSpec, patients: Sequence[Patient]) -> list[UserQuestion]:
    """Return LongHealth's held-out questions as they are asked, the patients in turn. Raises
    DataError where no question is held out."""
    data = spec.data
    found = in_turns(
        [
            [q for q in p.questions if is_held_out(q, data.held_out)]
            for p in sorted(patients, key=lambda p: p.id)
        ]
    )
    if not found:
        raise DataError(
            f"{data.path} has no held-out question: raise data.held_out (the share kept for "
            "evaluation), or data.patients"
        )
    return [
        UserQuestion(q.id, q.patient, option_prompt(q.text, q.options, data.instruction), choice=q)
        for q in found
    ]
