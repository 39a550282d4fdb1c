"""Define the rows of a run's answers.jsonl: every arm's answer to every evaluation question.

    {"arm": "on_policy", "step": 180, "sampled": false, "id": "patient_01/7",
     "fact": "what is the sodium?", "document": "patient_01", "document_hash": "0f3a...",
     "question_hash": "91bc...", "text": "the chart says sodium 41 mmol. the answer is 41 mmol.",
     "answer": "41 mmol", "expected": "41 mmol", "right": 1.0, "nll": 0.031, "reward": null,
     "tokens": 14}

Arms and runs are paired by document, id and the two hashes. So questions that share an id and are
about other documents are never paired.

Rows of token_scores.jsonl have doc_kl at every trained token, and what the teacher held likeliest
there, as text (`plugins.watch.score_text`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict, cast

from cartridge_forge.protocols.step import SampleScores

TEXT_LIMIT = 2000  # characters of a text; what was longer ends with a mark


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Hold one arm's answer to one question.

    `fact` names what is asked for: questions that differ in their options alone share it. `answer`
    is what was read from `text`, None where nothing could be. `right` is 1 or 0, or the share of
    right candidates; None where it cannot be judged. `nll` is the mean negative log-probability of
    `expected`, nats a token. `tokens` counts the response. What was not measured is None.
    `cartridge` answers the question in the arms that have one, else questions about the document,
    and `contexts` are what the arm document reads.
    """

    id: str
    fact: str
    document: str
    document_hash: str
    question_hash: str
    text: str | None = None
    answer: str | None = None
    expected: str | None = None
    right: float | None = None
    nll: float | None = None
    reward: float | None = None
    tokens: int = 0
    cartridge: str = ""
    contexts: tuple[str, ...] = ()


class _Prefixes(TypedDict, total=False):
    """Hold the fields that rows of earlier versions lack."""

    cartridge: str
    contexts: Sequence[str]


class AnswerRow(_Prefixes):
    """Hold a row of answers.jsonl: an `Answer` with the arm that gave it, the arm's step, and
    whether it was sampled or greedy."""

    arm: str
    step: int
    sampled: bool
    id: str
    fact: str
    document: str
    document_hash: str
    question_hash: str
    text: str | None
    answer: str | None
    expected: str | None
    right: float | None
    nll: float | None
    reward: float | None
    tokens: int


KeepAnswers = Callable[[Sequence[Answer]], None]


def to_row(answer: Answer, arm: str, step: int, *, sampled: bool) -> AnswerRow:
    """Return the row of an answer. Texts of more than TEXT_LIMIT characters are cut."""
    fields: dict[str, Any] = asdict(answer)
    for name in ("fact", "text", "answer", "expected"):
        fields[name] = cut(fields[name])
    return cast(AnswerRow, {"arm": arm, "step": step, "sampled": sampled, **fields})


def cut(text: str | None) -> str | None:
    """Return a text of at most TEXT_LIMIT characters; a longer one ends with how long it was."""
    if text is None or len(text) <= TEXT_LIMIT:
        return text
    mark = f" [cut: {len(text):,} characters]"
    return text[: TEXT_LIMIT - len(mark)] + mark


class TokenScoreRow(SampleScores):
    """Hold a row of token_scores.jsonl: the scores of one sample of a step."""

    arm: str
    step: int
    id: str
