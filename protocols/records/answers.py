"""Define the rows of a run's answers.jsonl: every arm's answer to every evaluation question.

    {"arm": "on_policy", "step": 180, "sampled": false, "id": "patient_01/7",
     "fact": "what is the sodium?", "document": "patient_01", "document_hash": "0f3a...",
     "question_hash": "91bc...", "text": "the chart says sodium 41 mmol. the answer is 41 mmol.",
     "answer": "41 mmol", "expected": "41 mmol", "right": 1.0, "nll": 0.031, "reward": null,
     "tokens": 14}

Arms and runs are paired by document, id and the two hashes. So questions that share an id and are
about other documents are never paired.

Rows of token_scores.jsonl have doc_kl at every trained token, in a byte each, and what the teacher
held likeliest there, in five bytes for each of TOP tokens.

    {"arm": "on_policy", "step": 12, "id": "on_policy/12/0", "kl": "AACzQP8=", "top": "BQAAAAo..."}

Both are base64. A byte of 0 is at most LEAST nats, 1 to 254 are spaced evenly in the logarithm from
LEAST to MOST, so that a value is off by 3% at most; 255 is a token that bears no loss. `top` has,
for each token that bears a loss, the teacher's likeliest tokens in order: four bytes of the token,
the least first, and -log p as such a byte. It is "" where the teacher was not asked.
"""

from __future__ import annotations

import base64
import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict, cast

from cartridge_forge.protocols.step import Completion, SampleScores

TEXT_LIMIT = 2000  # characters of a text; what was longer ends with a mark
HASH_DIGITS = 12


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


def hash_of(*texts: str) -> str:
    """Return the first HASH_DIGITS hexadecimal digits of the SHA-256 of texts."""
    joined = "\x00".join(texts).encode("utf-8", "surrogatepass")
    return hashlib.sha256(joined).hexdigest()[:HASH_DIGITS]


def mean_nll(completion: Completion, tokens: int) -> float | None:
    """Return the mean negative log-probability of a prompt's last `tokens` tokens, in nats; None
    where the completion has no log-probabilities of them."""
    read = completion.prompt_logprobs[-tokens:] if tokens else ()
    return -sum(read) / tokens if read and len(read) == tokens else None


def pairing_key(row: AnswerRow) -> tuple[str, str, str, str]:
    """Return what identifies a question over arms and runs."""
    return row["document"], row["document_hash"], row["id"], row["question_hash"]


def clusters(rows: Iterable[AnswerRow]) -> tuple[list[str], list[str]]:
    """Return the document and the fact of every row, as names that are unique over runs."""
    documents, facts = [], []
    for row in rows:
        document = f"{row['document']}/{row['document_hash']}"
        documents.append(document)
        facts.append(f"{document}/{row['fact']}")
    return documents, facts


LEAST = 1e-5  # nats
MOST = 50.0
NONE = 255
TOP = 3  # tokens of the teacher's
_STEPS = 254
_SCALE = _STEPS / math.log(MOST / LEAST)
_ENTRY = struct.Struct("<IB")

Likely = list[tuple[int, float]]  # tokens with their log-probability, the likeliest first


class TokenScoreRow(SampleScores):
    """Hold a row: the scores of one sample of a step."""

    arm: str
    step: int
    id: str


def encoded(values: Sequence[float | None]) -> str:
    """Return values in nats as text; None for a token without a score."""
    return base64.b64encode(bytes(map(_byte, values))).decode()


def decoded(text: str) -> list[float | None]:
    """Return the values of `encoded`, 0 for those of at most LEAST. Raises ValueError for a text
    that is no base64."""
    return [_value(byte) for byte in base64.b64decode(text, validate=True)]


def encoded_top(tokens: Sequence[Likely]) -> str:
    """Return the teacher's likeliest at each token with a score, as text; as many at each."""
    packed = (_ENTRY.pack(token, _byte(-p)) for likely in tokens for token, p in likely)
    return base64.b64encode(b"".join(packed)).decode()


def decoded_top(text: str, scores: Sequence[float | None]) -> list[Likely | None]:
    """Return the values of `encoded_top` at each of the `scores`, None for a token without one.
    Raises ValueError for a text that is not of as many tokens."""
    scored = sum(score is not None for score in scores)
    data = base64.b64decode(text, validate=True)
    count = len(data) // (scored * _ENTRY.size) if scored else 0
    if not count or len(data) != scored * count * _ENTRY.size:
        if data:
            raise ValueError(f"{len(data)} bytes are not the likeliest of {scored} tokens")
        return [None] * len(scores)
    entries: Iterator[tuple[int, int]] = _ENTRY.iter_unpack(data)
    likely = ([next(entries) for _ in range(count)] for _ in range(scored))
    return [
        None if score is None else [(token, -(_value(byte) or 0.0)) for token, byte in next(likely)]
        for score in scores
    ]


def _byte(value: float | None) -> int:
    if value is None or math.isnan(value):
        return NONE
    if value <= LEAST:  # also the rounding error below 0 of equal distributions
        return 0
    return min(_STEPS, max(1, round(_SCALE * math.log(min(value, MOST) / LEAST))))


def _value(byte: int) -> float | None:
    if byte == NONE:
        return None
    return LEAST * math.exp(byte / _SCALE) if byte else 0.0
