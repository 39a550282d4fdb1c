"""Choose the texts by whose attention a document is compacted (`attention_matching`).

document rows   stretches of the document, read again behind it: what it says
study rows      what the model with the document writes to prompts about it: how it is asked
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling

ROW = 64  # tokens of a document row
MOST_ROWS = 32  # of the document, where nothing recites it
ANSWER_TOKENS = 24  # of a study row, at most


@dataclass(frozen=True)
class StudyPrompts:
    """Hold the token ids of `prompts` about a document, behind its own, and the ids that end an
    answer; and of prompts with their answers, which are the document's own words: `recited`."""

    prompts: tuple[tuple[int, ...], ...] = ()
    end_ids: frozenset[int] = frozenset()
    recited: tuple[tuple[int, ...], ...] = ()


NO_STUDY = StudyPrompts()


@dataclass(frozen=True)
class ReferenceRow:
    """Hold the tokens of a text that is read behind a document."""

    ids: tuple[int, ...]


def row_starts(tokens: int, most: int = MOST_ROWS) -> list[int]:
    """Return where the rows of a document of T tokens begin: every ROW tokens, at most `most`,
    evenly spaced from its first token to its last."""
    count = min(most, -(-tokens // ROW))
    free = max(0, tokens - ROW)
    return [free * i // max(1, count - 1) for i in range(count)]


def document_rows(ids: Sequence[int], most: int = MOST_ROWS) -> list[ReferenceRow]:
    """Return the rows of a document of these tokens."""
    return [ReferenceRow(tuple(ids[s : s + ROW])) for s in row_starts(len(ids), most)]


def study_rows(
    model: LanguageModel, kv: Tensor, study: StudyPrompts, answer_tokens: int = ANSWER_TOKENS
) -> list[ReferenceRow]:
    """Return each prompt with the answer that the model likeliest writes to it behind a document's
    KV [L, 2, H_kv, T, D]; none where the document leaves no positions for it."""
    if not study.prompts:
        return []
    prefix, sampling = PrefixRef("document", 0), Sampling(0.0, max_tokens=answer_tokens)
    requests = [
        GenerateRequest(str(i), ids, prefix, sampling, 0, logprobs=False)
        for i, ids in enumerate(study.prompts)
    ]
    document = model.own_heads(kv).to(model.device)
    answers = generate(model, requests, lambda _: document, study.end_ids)
    return [
        ReferenceRow((*ids, *answer.token_ids))
        for ids, answer in zip(study.prompts, answers, strict=True)
    ]


def reference_rows(
    model: LanguageModel, ids: Sequence[int], kv: Tensor, study: StudyPrompts
) -> list[ReferenceRow]:
    """Return the rows of both kinds of a document's T tokens `ids` with their KV
    [L, 2, H_kv, T, D]: the document's own words are recited where there are prompts for that."""
    recited = [ReferenceRow(text) for text in study.recited]
    return [*(recited or document_rows(ids)), *study_rows(model, kv, study)]
