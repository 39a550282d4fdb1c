"""Turn the rows of self-study into the questions of a run.

Rows are checked to belong to the run. Those whose answers the document does not help with are
refused: where the teacher with and without the document agree, there is nothing to learn.

    gain = mean over the answer's tokens of log T(token | document) - log T(token | no document)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.chat.rollouts import mean_nll
from cartridge_forge.plugins.chat.special_tokens import require_text
from cartridge_forge.plugins.clinic.text import contains_words, spaced
from cartridge_forge.plugins.documents.corpus import Corpus
from cartridge_forge.plugins.documents.rows.records import DatasetRow
from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
from cartridge_forge.plugins.documents.study.agreement import StudyQuestion
from cartridge_forge.plugins.documents.study.prompts import of_contexts, titled_messages, titles_of
from cartridge_forge.plugins.documents.study.question_files import UserQuestion
from cartridge_forge.plugins.documents.synthesis_rows import StudyRow
from cartridge_forge.protocols.errors import CheckpointError, DataError
from cartridge_forge.protocols.files import write_atomically
from cartridge_forge.protocols.step import BARE, Completion, GenerateRequest, Sampling
from cartridge_forge.services.run_directory import RunDirectory
from cartridge_forge.training.records import GenerateCall, StudyPrompt, context_ref

NO_GAIN = "no_gain"


def context_titles(spec: DocumentsLearn, parts: Corpus) -> dict[str, str]:
    """Return the title that prompts about each context begin with, its document's; {} where they
    begin with none (`data.name_document`)."""
    names = {part.of: part.title or part.of for part in parts.parts.values()}
    return of_contexts(titles_of(spec.data, parts.layout, names), parts.layout)


def studied_of(
    row: StudyRow,
    spec: DocumentsLearn,
    conversation: ChatRenderer,
    titles: Mapping[str, str],
    model: str,
) -> StudyQuestion | None:
    """Return the question of a row; None when a trainer row cannot hold it with its answer. The
    answer's ids are those of `model` (`plugins.documents.synthesis.model_name`)."""
    ids = conversation.opening(row.document, titled_messages(titles, row.document, row.messages))
    if len(ids) + spec.rollout.max_tokens > spec.train.row_tokens:
        return None
    room = spec.train.row_tokens - len(ids)
    # Ids of another model's tokenizer mean nothing here: its answer text is tokenized again.
    is_tokenized = row.answer_ids and row.model == model
    answer = row.answer_ids if is_tokenized else ()
    if row.answer and not is_tokenized:
        answer = conversation.saying(row.answer)
    length = min(len(answer), room) if is_tokenized and len(row.teacher_ids) == len(answer) else 0
    identified = all(id >= 0 for at in row.teacher_ids[:length] for id in at)
    return StudyQuestion(
        row.key, row.document, row.kind, row.messages, ids, answer[:room],
        row.teacher_ids[:length] if identified else (),
        row.teacher_logprobs[:length] if identified else (),
    )  # fmt: skip


def row_question(
    row: DatasetRow,
    spec: DocumentsLearn,
    parts: Corpus,
    conversation: ChatRenderer,
    titles: Mapping[str, str],
) -> StudyQuestion | None:
    """Return a dataset's row as a question with its answer; None when a trainer row cannot hold it.
    A row about a document of several parts is about the first that holds its answer's words."""
    names = [name for name, part in parts.parts.items() if part.document.name == row.document]
    answer = "" if row.answer is None else str(row.answer)
    about = next(
        (name for name in names if contains_words(spaced(parts.texts[name]), spaced(answer))),
        names[0],
    )
    ids = conversation.opening(about, titled_messages(titles, about, row.messages))
    if len(ids) + spec.rollout.max_tokens > spec.train.row_tokens:
        return None
    answer_ids = conversation.saying(answer) if answer else ()
    room = spec.train.row_tokens - len(ids)
    return StudyQuestion(row.id, about, "row", row.messages, ids, answer_ids[:room])


def user_question(studied: StudyQuestion, row: DatasetRow) -> UserQuestion:
    """Return a held-out row with an answer as a question that decides the accuracy."""
    return UserQuestion(
        studied.key, studied.document, row.messages[-1].content, (str(row.answer),),
        before=row.messages[:-1],
    )  # fmt: skip


def require_scores(studied: Sequence[StudyQuestion], where: str | None) -> None:
    """Raise DataError unless every answer has the same number of teacher tokens at every place."""
    lacking = [s.key for s in studied if not s.teacher_ids]
    if lacking:
        raise DataError(
            f"{where}: {len(lacking)} of {len(studied)} rows to train on have no answer with "
            f"log-probabilities of this model's tokens, the first is {lacking[0]}; write them with "
            "this model and self_study.top_k > 0, or set self_study.scores: read"
        )
    counts = sorted({len(at) for s in studied for at in s.teacher_ids})
    if len(counts) > 1:
        raise DataError(
            f"{where}: rows keep {counts} log-probabilities a token; keep one file for each "
            "self_study.top_k, or set self_study.scores: read"
        )


def note_documents(parts: Corpus, directory: RunDirectory) -> None:
    """Write the run's list of documents. Raises CheckpointError when it differs on resume."""
    facts = parts.as_dict()
    if directory.documents.exists():
        recorded = json.loads(directory.documents.read_bytes())
        if recorded["documents"] != facts["documents"]:
            raise CheckpointError(
                f"the documents changed since the run began ({directory.documents}); bring them "
                "back, or start anew without --resume"
            )
        return
    write_atomically(directory.documents, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")


def of_parts(rows: Sequence[StudyRow], parts: Corpus, where: str) -> list[StudyRow]:
    """Return the rows. Raises DataError when one is about a text that is not in `parts`."""
    for row in rows:
        part = parts.parts.get(row.document)
        if part is None or part.document.sha256 != row.sha256:
            raise DataError(
                f"{where}: {row.key} is about {row.document} of hash {row.sha256[:12]}, which is "
                "none of the run's documents; write the rows anew with `forge selfstudy`"
            )
    return list(rows)


def require_study(rows: Sequence[StudyRow], where: str, tokenizer: Any) -> None:
    """Raise DataError where turns or answers of a file's rows have special tokens of the model."""
    texts = (
        (row.key, text)
        for row in rows
        if row.kept
        for text in (*(m.content for m in row.messages), row.answer)
    )
    require_text(tokenizer, texts, f"rows of {where}")


def completion_of_row(studied: StudyQuestion, prompt: StudyPrompt) -> Completion:
    """Return B's written answer as a Completion, with zeros for its unknown log-probabilities."""
    ids = studied.answer_ids
    return Completion(prompt.request.id, ids, (0.0,) * len(ids), (0,) * len(ids), "stop")


async def gains(
    studied: Sequence[StudyQuestion],
    bare: Mapping[str, tuple[int, ...]],
    generate: GenerateCall,
) -> dict[str, float]:
    """Return the gain of each question with an answer, nats a token, by its key. `bare` has the
    prompt without a document by key."""
    answered = [s for s in studied if s.answer_ids]
    once = Sampling(temperature=0.0, max_tokens=1)
    requests = []
    for s in answered:
        for name, ids, prefix in (
            ("document", s.prompt_ids, context_ref((s.document,))),
            ("none", bare[s.key], BARE),
        ):
            requests.append(
                GenerateRequest(
                    f"gain/{name}/{s.key}", (*ids, *s.answer_ids), prefix, once, 0,
                    prompt_logprobs=True,
                )
            )  # fmt: skip
    read = await generate(requests) if requests else []
    gain_of = {}
    for i, s in enumerate(answered):
        with_document, none = (mean_nll(c, len(s.answer_ids)) for c in read[2 * i : 2 * i + 2])
        if with_document is not None and none is not None:
            gain_of[s.key] = none - with_document
    return gain_of


def weighed(rows: Sequence[StudyRow], gain_of: Mapping[str, float], least: float) -> list[StudyRow]:
    """Return the rows with their gains; those of less than `least` are refused."""
    return [
        replace(row, gain=gain_of[row.key], refused=NO_GAIN if gain_of[row.key] < least else "")
        if row.key in gain_of
        else row
        for row in rows
    ]
