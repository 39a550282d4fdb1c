"""Plan a run with self-study: the documents, their passages, and the cost.

The planned passages are those that the run will draw: draws depend on the documents alone.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from cartridge_forge.forge_run.plan.inputs import at_hand, tokenizer_at
from cartridge_forge.plugins.documents.corpus import Corpus, CorpusDocument
from cartridge_forge.plugins.documents.drafts import SynthesisPlan, passage_of
from cartridge_forge.plugins.documents.formats import ReadOptions
from cartridge_forge.plugins.documents.reading import (
    ReadLimits,
    SkippedFile,
    read_documents,
    require_files,
)
from cartridge_forge.plugins.documents.spec.documents import SEED_KINDS, SelfStudySpec
from cartridge_forge.plugins.documents.synthesis import planned_turns
from cartridge_forge.plugins.documents.synthesis_rows import few_turns
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.statistics.formatting import TableSection, facts, lines
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.layout import length_warning

MOST_ROWS = 24
CHARS_PER_TOKEN = 4  # of English, an estimate without the model's tokenizer
SEED_TOKENS = 90  # the seed prompt that A reads beside its passage
HEADS = ("document", "from", "tokens", "characters", "hash", "passages of self-study, tokens")


def studied(learn: RsaLearn) -> tuple[RsaLearn, list[TableSection]]:
    """Return the spec with the documents' number and mean tokens, and the plan's sections on them.
    Raises DataError as `read_material` does."""
    if learn.self_study is None:
        return learn, []
    if learn.data.path is None or (learn.data.source == "longhealth" and not at_hand(learn)):
        countable = learn.data.source == "longhealth"  # its charts are as many as data.patients
        tables = [facts("self-study", study_rows(learn, learn.data.patients, ()))]
        return learn, tables if countable else []
    require_sources(learn)
    tokenizer = tokenizer_at(learn.model.path)
    if tokenizer is None:
        return _estimated(learn)
    parts = _material(learn, tokenizer)
    counts = [len(part.tokens) for part in parts.parts.values()]
    documents = len(set(parts.layout.documents.values()))
    rows = [_row(part, learn) for part in parts.parts.values()]
    if (more := len(rows) - MOST_ROWS) > 0:
        rows[MOST_ROWS:] = [(f"and {more} more", *[""] * (len(HEADS) - 1))]
    cartridges = len(parts.layout.cartridges)
    cartridge_text = (
        "a cartridge each" if cartridges == len(counts) else f"cartridges: {cartridges}"
    )
    title = documents_text(parts.count, len(counts))
    title += f", {sum(counts):,} tokens, {cartridge_text}"
    sections = [TableSection(title, HEADS, tuple(rows))]
    if odd := [*remarks(parts), *_warnings(parts, learn)]:
        sections.append(lines("left out, or read in an unusual way", odd))
    passages = [size for part in parts.parts.values() for size in passage_tokens(part, learn)]
    unit = "part" if len(counts) > parts.count else "document"
    sections.append(facts("self-study", study_rows(learn, len(counts), passages, unit)))
    return _sized(learn, documents, sum(counts)), sections


def require_documents(learn: RsaLearn) -> list[str]:
    """Return notes to print before a run starts. Raises DataError for documents or questions that
    cannot be used."""
    require_sources(learn)
    tokenizer = tokenizer_at(learn.model.path)
    if tokenizer is None:
        raise DataError(
            f"no tokenizer at {learn.model.path!r}; set model to a directory with tokenizer.json, "
            "or to a hub id that this machine can reach"
        )
    parts = _material(learn, tokenizer)
    return [*remarks(parts), *_warnings(parts, learn)]


def require_sources(learn: RsaLearn) -> None:
    """Refuse a missing or empty folder, and missing questions or rows, before the tokenizer is
    read, which takes seconds and may ask the hub."""
    if learn.data.source == "documents" and learn.data.path is not None:
        require_files(learn.data.path.split(os.pathsep))
    rows = learn.self_study.rows if learn.self_study else None
    for key, path in (("data.questions", learn.data.questions), ("self_study.rows", rows)):
        if path is not None and not Path(path).is_file():
            raise DataError(f"there is no file {path}; check {key}")


def _warnings(parts: Corpus, learn: RsaLearn) -> list[str]:
    sizes = {name: len(part.tokens) for name, part in parts.parts.items()}
    texts = {
        c: sum(sizes[name] for name in chunk_names)
        for c, chunk_names in parts.layout.contexts.items()
    }
    warning = length_warning(learn.cartridge.tokens, texts)
    warnings = [] if warning is None else [warning]
    study = learn.self_study
    if study is not None and study.rows is None:
        plan = SynthesisPlan(study, learn.model.path, learn.train.seed, answers=False)
        few = few_turns(planned_turns([*parts.parts.values()], plan))
        warnings += few[:MOST_ROWS]
        if (more := len(few) - MOST_ROWS) > 0:
            warnings.append(f"{more} more kinds of turns with less than half of them")
    return [f"warning: {text}" for text in warnings]


def remarks(parts: Corpus) -> list[str]:
    """Return remarks on documents left out, or read in an unusual way."""
    return [*(f"left out: {x}" for x in parts.left_out), *(f"note: {x}" for x in parts.notes)]


def documents_text(documents: int, parts: int) -> str:
    """Return `3 documents`, or `3 documents in 7 parts`."""
    text = f"{documents:,} documents"
    return text if parts == documents else f"{text} in {parts:,} parts"


def study_rows(
    learn: RsaLearn, documents: int, passages: Sequence[int], unit: str = "document"
) -> list[tuple[str, str]]:
    """Return rows on the conversations and on the most tokens that asker A and answerer B read and
    write; of `passages`, in tokens, there are none where no text is at hand."""
    study = learn.self_study
    assert study is not None
    turns = documents * study.questions
    by_kind = Counter(study.kinds(study.questions))
    kinds = ", ".join(
        f"{kind} {documents * by_kind[kind]:,}" for kind in study.mix if by_kind[kind]
    )
    rows = [("turns", f"{study.questions} a {unit}, {turns:,} in all: {kinds}")]
    if study.rounds > 1:
        rows[0] = ("conversations", rows[0][1])
        rows.append(("rounds", f"{study.rounds}; the answer to the last is trained on"))
    if passages:
        sizes = f"{min(passages):,} to {max(passages):,} tokens, {fmean(passages):,.0f} on average"
        rows.append(("passages", sizes))
    else:
        rows.append(("passages", f"of {study.min_chunk:,} to {study.max_chunk:,} tokens"))
    if learn.data.source == "longhealth":
        rows.append(("never asked", "LongHealth's own questions, which measure the accuracy"))
    else:
        held_out = f"{learn.data.held_out:.0%} of them, to measure agreement with the teacher"
        rows.append(("held out", held_out))
    if study.rows is not None:
        return [("rows", study.rows), *rows]
    written_share = sum(by_kind[kind] for kind in (*SEED_KINDS, "quiz")) / study.questions
    if not passages or not written_share:  # the documents' own words alone
        return rows
    asked_tokens, read = round(written_share * len(passages)), round(written_share * sum(passages))
    a, b = study_cost(study, asked_tokens, read, rounds=study.rounds)
    rows.append(("A", f"reads about {a[0]:,} tokens, writes at most {a[1]:,}"))
    if study.rounds > 1:
        _, early = study_cost(study, asked_tokens, read, rounds=study.rounds - 1)
        costs = f"reads about {early[0]:,} tokens, writes at most {early[1]:,}"
        rows.append(("B", f"in a run: {costs}"))
    rows.append(
        ("B", f"for `forge selfstudy`: reads about {b[0]:,} tokens, writes at most {b[1]:,}")
    )
    if (api := study.api) is not None:
        cost = "price unknown: set self_study.api.prices"
        if api.prices is not None:
            dollars = (a[0] + b[0]) * api.prices.input + (a[1] + b[1]) * api.prices.output
            cost = f"at most ${dollars / 1e6:,.2f}"
        rows.append(("written by", f"{api.model} ({api.provider}) for `forge selfstudy`: {cost}"))
    return rows


def study_cost(
    study: SelfStudySpec, turns: int, passages: int, *, rounds: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (tokens read, most tokens written) of A and of B in `turns` conversations, about
    passages of so many tokens in all; each round reads what was said before it."""
    earlier_rounds = rounds * (rounds - 1) // 2  # earlier rounds, summed over the rounds
    context = turns * earlier_rounds * (study.question_tokens + study.answer_tokens)
    question_tokens, answered = (
        rounds * turns * n for n in (study.question_tokens, study.answer_tokens)
    )
    read = rounds * passages + context
    return (read + rounds * turns * SEED_TOKENS, question_tokens), (
        read + question_tokens,
        answered,
    )


def passage_tokens(part: CorpusDocument, learn: RsaLearn) -> list[int]:
    """Return the tokens of each passage that self-study draws from a document."""
    assert learn.self_study is not None
    study, seed = learn.self_study, learn.train.seed
    return [passage_of(part, i, study, seed)[0].tokens for i in range(study.questions)]


def _row(part: CorpusDocument, learn: RsaLearn) -> tuple[str, ...]:
    sizes = passage_tokens(part, learn)
    return (
        part.name, part.document.source, f"{len(part.tokens):,}",
        f"{part.chunk.start_char:,} to {part.chunk.stop_char:,}", part.document.sha256[:12],
        f"{len(sizes)} of {min(sizes):,} to {max(sizes):,}",
    )  # fmt: skip


def _estimated(learn: RsaLearn) -> tuple[RsaLearn, list[TableSection]]:
    read, left_out = learn.documents, tuple[SkippedFile, ...]()
    assert learn.data.path is not None
    if learn.data.source == "longhealth":
        from cartridge_forge.plugins.documents.study.longhealth import read_patients

        texts = [p.document for p in read_patients(learn.data)]
    else:
        read_result = read_documents(
            learn.data.path.split(os.pathsep),
            ReadOptions(read.text_fields, read.encoding),
            ReadLimits(read.max_file_bytes, read.max_total_bytes),
        )
        texts, left_out = [d.text for d in read_result.documents], read_result.left_out
        if learn.data.questions is not None:
            from cartridge_forge.plugins.documents.study.question_files import read_questions

            named = {d.name: d.text for d in read_result.documents}
            read_questions(learn.data.questions, named, learn.data.instruction)
    counts = [len(text) // CHARS_PER_TOKEN for text in texts]
    rows = [
        ("tokens", f"about {sum(counts):,}: the model's tokenizer is not at hand, so "
         f"{CHARS_PER_TOKEN} characters each; parts and passages are unknown"),
        *(("left out", str(item)) for item in left_out),
    ]  # fmt: skip
    tables = facts("self-study", study_rows(learn, len(counts), ()))
    return _sized(learn, len(counts), sum(counts)), [
        facts(documents_text(len(counts), len(counts)), rows),
        tables,
    ]


def _sized(learn: RsaLearn, documents: int, tokens: int) -> RsaLearn:
    """Return the spec with so many documents, and their mean of the tokens."""
    sizes = {"patients": documents, "document_tokens": max(1, round(tokens / documents))}
    return learn.model_copy(update={"data": learn.data.model_copy(update=sizes)})


def _material(learn: RsaLearn, tokenizer: Any) -> Corpus:
    # Imported here, because plans of other data are to need no torch.
    from cartridge_forge.plugins.documents.study.material import read_material
    from cartridge_forge.plugins.documents.study.rows import of_parts
    from cartridge_forge.plugins.documents.synthesis import read_rows

    corpus, _ = read_material(learn, tokenizer)
    if learn.self_study is not None and (rows := learn.self_study.rows) is not None:
        of_parts(read_rows(Path(rows)), corpus, rows)
    return corpus
