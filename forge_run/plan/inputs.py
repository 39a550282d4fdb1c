"""Read a run's data before it starts, as the run itself reads it: charts, problems, texts, rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.documents.rows.reading import RowSet
from cartridge_forge.plugins.documents.rows.records import DatasetRow
from cartridge_forge.plugins.documents.spec.rows import ROW_SOURCES
from cartridge_forge.plugins.environments.spec import OF_DOCUMENTS
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.statistics.formatting import TableSection, facts
from cartridge_forge.protocols.errors import DataError


def at_hand(learn: RsaLearn) -> bool:
    """Return whether a file of charts, or its URL, is given and there."""
    path = learn.data.path
    return path is not None and (path.startswith(("http://", "https://")) or Path(path).is_file())


def sections(learn: RsaLearn) -> list[TableSection]:
    """Return the plan's section on the charts of a run without self-study, after every check that
    the run makes of its charts, problems and texts. Raises DataError as the run does."""
    if learn.self_study is not None or learn.data.source in ROW_SOURCES:
        return []  # `forge_run.plan.documents` and `forge_run.plan.datasets` read them
    if learn.episodes is not None:
        if learn.data.source == "environment":
            from cartridge_forge.plugins.episodes.task_sources.environment import EnvironmentTasks

            EnvironmentTasks(learn)
        return []
    if not at_hand(learn):
        return []
    if learn.rsa is not None:
        if learn.rsa.problems.kind in OF_DOCUMENTS:
            from cartridge_forge.plugins.rsa.problems import OfPatients

            OfPatients(learn)
        return []
    return [_charts(learn)]


def _charts(learn: RsaLearn) -> TableSection:
    from cartridge_forge.plugins.clinic.text import is_held_out
    from cartridge_forge.plugins.documents.study.longhealth import open_prompts, read_patients

    patients = read_patients(learn.data)
    questions = [q for patient in patients for q in patient.questions]
    held_out = sum(is_held_out(q, learn.data.held_out) for q in questions)
    rows = [
        ("patients", f"{len(patients)}, {sum(len(p.texts) for p in patients)} notes"),
        ("questions", f"{len(questions)}, {held_out} of them held out"),
    ]
    tokenizer = tokenizer_at(learn.model.path)
    if tokenizer is not None:
        prompts = open_prompts(learn, tokenizer)
        sizes = [len(ids) for name, ids in prompts.documents.items() if name in prompts.texts]
        rows.append(
            ("charts or chunks", f"{len(sizes)} of {min(sizes):,} to {max(sizes):,} tokens")
        )
        if learn.evaluate.arms:
            rows.append(("evaluated on", f"{len(prompts.exams)} questions"))
    return facts(f"charts of {learn.data.path}", rows)


def row_lengths(learn: RsaLearn, rows: RowSet) -> list[str]:
    """Return notes on rows whose prompt is too long to be answered: of an episode, over
    `episodes.max_context`; else over what `train.row_tokens` leaves. Without a tokenizer the
    note is that they are unknown.

    Raises DataError where none is left to train on, and for documents that no cartridge can stand
    for.
    """
    from cartridge_forge.plugins.chat.renderer import ChatRenderer
    from cartridge_forge.plugins.documents.rows.checks import require_lengths
    from cartridge_forge.plugins.documents.study.material import row_corpus
    from cartridge_forge.plugins.episodes.task_sources.base import PRIMER, PRIMER_TEXT

    tokenizer = tokenizer_at(learn.model.path)
    if tokenizer is None:
        return ["the lengths of prompts are unknown: the model's tokenizer is not at hand"]
    texts = {**rows.texts, PRIMER: PRIMER_TEXT}
    if learn.episodes is not None:
        most, key = learn.episodes.max_context, "episodes.max_context"
        why = "their episodes end at once as context_full"
        used = (row.document or PRIMER for row in (*rows.training, *rows.held_out))
        require_lengths(learn, {name: texts[name] for name in used}, tokenizer)
    else:
        from cartridge_forge.plugins.documents.spec.documents import SelfStudySpec

        most, key = learn.train.row_tokens - learn.rollout.max_tokens, "train.row_tokens"
        why = "they are left out"
        study = learn.model_copy(update={"self_study": SelfStudySpec()})
        row_corpus(study, rows, tokenizer)
    conversation = ChatRenderer(tokenizer, texts)
    notes = []
    for side, side_rows in (("training", rows.training), ("held-out", rows.held_out)):
        long = _longer(side_rows, most, conversation)
        if not long:
            continue
        size, row = max(long, key=lambda pair: pair[0])
        message = (
            f"{len(long):,} of {len(side_rows):,} {side} rows have prompts over {key} "
            f"({most} tokens{'' if learn.episodes else ' beside rollout.max_tokens'}), "
            f"the longest {row.place} with {size:,}"
        )
        if len(long) == len(side_rows):
            raise DataError(f"{message}: none is left; raise {key}, or give shorter rows")
        notes.append(f"{message}: {why}; raise {key}, or shorten them")
    return notes


def _longer(
    rows: Sequence[DatasetRow], most: int, conversation: Any
) -> list[tuple[int, DatasetRow]]:
    """Return the rows whose prompt has more than `most` tokens, each after its number of tokens.
    Those of few bytes are not tokenized: no token is less than a byte."""
    from cartridge_forge.plugins.chat.messages import AgentMessage
    from cartridge_forge.plugins.episodes.task_sources.base import PRIMER

    empty = len(conversation.opening(PRIMER, (AgentMessage("user", "x"),)))
    long_rows = []
    for row in rows:
        size = sum(empty + len(m.content.encode("utf-8", "replace")) for m in row.messages)
        if row.tools or size > most:
            size = len(conversation.opening(row.document or PRIMER, row.messages, row.tools))
            if size > most:
                long_rows.append((size, row))
    return long_rows


def tokenizer_at(path: str) -> Any:
    """Return None for an absent model. Raises DataError for one without a chat template."""
    from cartridge_forge.learning.model.loading import NoTokenizer, load_tokenizer

    try:
        return load_tokenizer(path)
    except NoTokenizer:
        return None
