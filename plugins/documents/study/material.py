"""Open what a run studies by itself: a user's files, or LongHealth's charts and their questions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cartridge_forge.plugins.chat.special_tokens import require_text
from cartridge_forge.plugins.clinic.text import PatientQuestion, is_held_out, option_prompt
from cartridge_forge.plugins.documents.corpus import Corpus, corpus_of, read_parts
from cartridge_forge.plugins.documents.reading import ReadResult, SkippedFile, UserDocument
from cartridge_forge.plugins.documents.rows.reading import RowSet
from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
from cartridge_forge.plugins.documents.study.longhealth import LongHealthPrompts, open_prompts
from cartridge_forge.plugins.documents.study.question_files import UserQuestion, read_question_file
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import SEPARATOR
from cartridge_forge.training.records import interleave


def read_material(spec: DocumentsLearn, tokenizer: Any) -> tuple[Corpus, list[UserQuestion]]:
    """Return the documents, and the questions that decide the accuracy, the documents in turn:
    those of data.questions, or LongHealth's held-out ones. The `document` of a question is what it
    is about: a context, or several that are read as one text.

    Raises DataError for documents or questions that cannot be read or used.
    """
    if spec.data.source == "longhealth":
        prompts = open_prompts(spec, tokenizer)
        return chart_corpus(spec, prompts, tokenizer), held_out_questions(spec, prompts)
    corpus = read_parts(spec, tokenizer)
    if spec.data.questions is None:
        return corpus, []
    file = spec.data.questions
    read = read_question_file(file, corpus.texts, spec.data.instruction, corpus.layout.documents)
    require_questions(read.questions, file, tokenizer)
    notes = (SkippedFile(file, note) for note in read.notes)
    corpus = replace(corpus, notes=(*corpus.notes, *notes))
    asked = [[q for q in read.questions if q.document == name] for name in corpus.parts]
    return corpus, interleave(asked)


def require_questions(asked: Sequence[UserQuestion], file: str, tokenizer: Any) -> None:
    """Raise DataError where questions or answers of a file have special tokens of the model."""
    texts = (
        (q.id, text) for q in asked for text in (*(m.content for m in q.messages), q.wording or "")
    )
    require_text(tokenizer, texts, f"questions of {file}")


def row_corpus(spec: DocumentsLearn, rows: RowSet, tokenizer: Any) -> Corpus:
    """Return the documents of a dataset's rows. Raises DataError for one that no cartridge can
    stand for."""
    read = [_document(name, text, rows.source) for name, text in rows.texts.items()]
    corpus = corpus_of(spec, ReadResult(tuple(read)), tokenizer)
    lacking = sorted(set(rows.texts) - {part.document.name for part in corpus.parts.values()})
    if lacking:
        listed = "".join(f"\n  {item}" for item in (*corpus.left_out, *corpus.notes))
        raise DataError(
            f"the rows about {', '.join(lacking)} need a cartridge of the whole document; lower "
            f"cartridge.tokens, or correct the documents{listed}"
        )
    return corpus


def chart_corpus(spec: DocumentsLearn, prompts: LongHealthPrompts, tokenizer: Any) -> Corpus:
    """Return the patients' charts or their chunks, each with its first line as `about` and the
    patient's name as `title`. A chunk's places are those in its own text.

    Raises DataError where a chart is no longer than a cartridge or has one of the model's special
    tokens: its questions would then have no cartridge.
    """
    owners, source = prompts.layout.documents, spec.data.path
    charts = {name: _document(name, p.document, source) for name, p in prompts.patients.items()}
    read = [_document(name, text, source) for name, text in prompts.texts.items()]
    corpus = corpus_of(spec, ReadResult(tuple(read)), tokenizer, owners)
    lacking = dict.fromkeys(owners[name] for name in prompts.texts if name not in corpus.parts)
    if lacking:
        listed = "".join(f"\n  {item}" for item in (*corpus.left_out, *corpus.notes))
        raise DataError(
            f"the questions about {', '.join(lacking)} need a cartridge of the whole chart; lower "
            f"data.patients or cartridge.tokens, or correct the chart{listed}"
        )
    parts = {
        name: replace(
            part, document=charts[part.of], about=part.text.partition("\n")[0],
            title=prompts.patients[part.of].name,
        )
        for name, part in corpus.parts.items()
    }  # fmt: skip
    return replace(corpus, parts=parts)


def _document(name: str, text: str, source: str | None) -> UserDocument:
    """Return a chart or chunk as a document; `source` is the file or URL of all charts."""
    return UserDocument(name, f"{source}#{name}", text, _sha256(text), "utf-8")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def held_out_questions(spec: DocumentsLearn, prompts: LongHealthPrompts) -> list[UserQuestion]:
    """Return LongHealth's held-out questions as they are asked, the patients in turn. Raises
    DataError where no question is held out."""
    data, patients = spec.data, prompts.patients
    by_patient: list[Sequence[PatientQuestion]] = [
        [q for q in patient.questions if is_held_out(q, data.held_out)]
        for _, patient in sorted(patients.items())
    ]
    found = interleave(by_patient)
    if not found:
        raise DataError(
            f"{data.path} has no held-out question: raise data.held_out (the share kept for "
            "evaluation), or data.patients"
        )
    asked = []
    for q in found:
        about = SEPARATOR.join(prompts.contexts_of(q.patient, patients[q.patient].places_of(q)))
        text = option_prompt(q.text, q.options, data.instruction)
        asked.append(UserQuestion(q.id, about, text, choice=q))
    return asked
