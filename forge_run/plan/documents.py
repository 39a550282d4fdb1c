"""Plan a run on a user's documents: the documents, their passages, and the cost.

The planned passages are those that the run will draw: draws depend on the documents alone.
"""

from __future__ import annotations

import os
from statistics import fmean
from typing import Any

from documents.corpus import Corpus, CorpusDocument, read_parts
from documents.formats import ReadOptions
from documents.reading import ReadLimits, read_documents
from documents.synthesis import passage_of
from forge_run.formatting import TableSection, facts, lines
from protocols.errors import DataError
from protocols.spec.learn import LearnSpec

MOST_ROWS = 24
CHARS_PER_TOKEN = 4  # of English, an estimate without the model's tokenizer
SEED_TOKENS = 90  # the seed prompt that A reads beside its passage
HEADS = ("document", "from", "tokens", "characters", "hash", "passages of self-study, tokens")


def studied(learn: LearnSpec) -> tuple[LearnSpec, list[TableSection]]:
    """Return the spec with the documents' number and mean tokens, and the plan's sections on them.
    Raises DataError as `read_parts` does."""
    if learn.self_study is None or learn.data.path is None:
        return learn, []
    tokenizer = tokenizer_at(learn.model.path)
    if tokenizer is None:
        return _estimated(learn)
    parts = read_parts(learn, tokenizer)
    counts = [len(part.tokens) for part in parts.parts.values()]
    documents = len(set(parts.layout.documents.values()))
    rows = [_row(part, learn) for part in parts.parts.values()]
    if (more := len(rows) - MOST_ROWS) > 0:
        rows[MOST_ROWS:] = [(f"and {more} more", *[""] * (len(HEADS) - 1))]
    made = len(parts.layout.cartridges)
    each = "a cartridge each" if made == documents else f"cartridges: {made}"
    title = f"{documents} documents, {sum(counts):,} tokens, {each}"
    sections = [TableSection(title, HEADS, tuple(rows))]
    if odd := remarks(parts):
        sections.append(lines("left out, or read in an unusual way", odd))
    sections.append(facts("self-study", study_rows(learn, parts)))
    return _sized(learn, documents, sum(counts)), sections


def require_documents(learn: LearnSpec) -> list[str]:
    """Return notes to print before a run starts. Raises DataError for documents or questions that
    cannot be used."""
    tokenizer = tokenizer_at(learn.model.path)
    if tokenizer is None:
        raise DataError(
            f"no tokenizer at {learn.model.path!r}; set model to a directory with tokenizer.json, "
            "or to a hub id that this machine can reach"
        )
    parts = read_parts(learn, tokenizer)
    if learn.data.questions is not None:
        from training.recipes.question_files import read_questions

        of = parts.layout.documents
        read_questions(learn.data.questions, parts.texts, learn.data.instruction, of)
    return remarks(parts)


def remarks(parts: Corpus) -> list[str]:
    """Return remarks on documents left out, or read in an unusual way."""
    return [*(f"left out: {x}" for x in parts.left_out), *(f"note: {x}" for x in parts.notes)]


def study_rows(learn: LearnSpec, parts: Corpus) -> list[tuple[str, str]]:
    """Return rows on the most tokens that asker A and answerer B read and write."""
    study = learn.self_study
    assert study is not None
    turns = len(parts.parts) * study.questions
    passages = [size for part in parts.parts.values() for size in passage_tokens(part, learn)]
    writes = turns * study.question_tokens
    reads = sum(passages) + turns * SEED_TOKENS
    rows = [
        ("turns", f"{study.questions} a document, {turns:,} in all: {', '.join(study.kinds)}"),
        (
            "passages",
            f"{min(passages):,} to {max(passages):,} tokens, {fmean(passages):,.0f} on average",
        ),
        ("held out", f"{learn.data.held_out:.0%} of them, to measure agreement with the teacher"),
    ]
    if study.rows is not None:
        return [("rows", study.rows), *rows]
    rows.append(("A", f"reads about {reads:,} tokens, writes at most {writes:,}"))
    answers = turns * study.answer_tokens
    again = sum(passages) + writes
    rows.append(
        ("B", f"for `forge selfstudy`: reads about {again:,} tokens, writes at most {answers:,}")
    )
    if (api := study.api) is not None:
        cost = "price unknown: set self_study.api.prices"
        if api.prices is not None:
            dollars = (reads + again) * api.prices.input + (writes + answers) * api.prices.output
            cost = f"at most ${dollars / 1e6:,.2f}"
        rows.append(("written by", f"{api.model} ({api.provider}) for `forge selfstudy`: {cost}"))
    return rows


def passage_tokens(part: CorpusDocument, learn: LearnSpec) -> list[int]:
    """Return the tokens of each passage that self-study draws from a document."""
    assert learn.self_study is not None
    study, seed = learn.self_study, learn.train.seed
    return [passage_of(part, i, study, seed)[0].tokens for i in range(study.questions)]


def _row(part: CorpusDocument, learn: LearnSpec) -> tuple[str, ...]:
    sizes = passage_tokens(part, learn)
    return (
        part.name, part.document.source, f"{len(part.tokens):,}",
        f"{part.chunk.start_char:,} to {part.chunk.stop_char:,}", part.document.sha256[:12],
        f"{len(sizes)} of {min(sizes):,} to {max(sizes):,}",
    )  # fmt: skip


def _estimated(learn: LearnSpec) -> tuple[LearnSpec, list[TableSection]]:
    read = learn.documents
    assert learn.data.path is not None
    found = read_documents(
        learn.data.path.split(os.pathsep),
        ReadOptions(read.text_fields, read.encoding),
        ReadLimits(read.max_file_bytes, read.max_total_bytes),
    )
    counts = [len(d.text) // CHARS_PER_TOKEN for d in found.documents]
    rows = [
        ("tokens", f"about {sum(counts):,}: the model's tokenizer is not at hand, so "
         f"{CHARS_PER_TOKEN} characters each; parts and passages are unknown"),
        *(("left out", str(item)) for item in found.left_out),
    ]  # fmt: skip
    return _sized(learn, len(counts), sum(counts)), [facts(f"{len(counts)} documents", rows)]


def _sized(learn: LearnSpec, documents: int, tokens: int) -> LearnSpec:
    """Return the spec with so many documents, and their mean of the tokens."""
    known = {"patients": documents, "document_tokens": max(1, round(tokens / documents))}
    return learn.model_copy(update={"data": learn.data.model_copy(update=known)})


def tokenizer_at(path: str) -> Any:
    """Return None for an absent model. Raises DataError for one without a chat template."""
    from learning.model.loading import load_tokenizer

    try:
        return load_tokenizer(path)
    except DataError:
        raise
    except (OSError, ValueError):
        return None
