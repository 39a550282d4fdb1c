"""Tell which passages of a document its cartridge recalls, by the held-out questions about them.

document -> passages                   lines, cut into sentences
question -> the passage it is about    the one that shares most of its words, and first of those
                                       with the right answer's words one after another
passage  -> asked, right               over the greedy answers of the arm on policy
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cartridge_forge.plugins.documents.retrieval import terms_of
from cartridge_forge.plugins.serve.engine.run_documents import document_of
from cartridge_forge.plugins.watch.pages.run_view import RunView
from cartridge_forge.protocols.errors import ForgeError
from cartridge_forge.protocols.files import iter_rows

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=\S)")
MOST_CHARACTERS = 200_000  # of a document that is shown


def recalled(view: RunView, cartridge: str) -> dict[str, Any]:
    """Return the passages of a cartridge's document, with how many questions about each were
    answered, and how many right; `why_not` tells why nothing is known."""
    try:
        text = document_of(view.run.path, cartridge)
    except (ForgeError, OSError) as error:
        return {"passages": [], "why_not": str(error)}
    passages = split_passages(text[:MOST_CHARACTERS])
    answers = _answers(view, cartridge)
    tally = tallied(passages, [row for row in answers if row["right"] is not None])
    why_not = "no question was answered yet"
    if answers:
        why_not = "its questions have no right answers to compare with"
    return {
        "passages": [
            {"text": passage, "line": line, "asked": questions, "right": right}
            for (line, passage), (questions, right) in zip(passages, tally, strict=True)
        ],
        "why_not": None if any(questions for questions, _ in tally) else why_not,
        "cut": len(text) > MOST_CHARACTERS,
        "tokens": view.token_count(text),
    }  # fmt: skip


def _answers(view: RunView, cartridge: str) -> list[Mapping[str, Any]]:
    rows = (row for row in iter_rows(view.run.answers) if row.get("cartridge") == cartridge)
    return [row for row in rows if row["arm"] == "on_policy" and not row["sampled"]]


def split_passages(text: str) -> list[tuple[int, str]]:
    """Return the sentences of a text with the number of each one's line."""
    return [
        (number, part)
        for number, line in enumerate(text.splitlines())
        for part in _SENTENCE.split(line.strip())
        if part
    ]


def tallied(
    passages: Sequence[tuple[int, str]], answers: Sequence[Mapping[str, Any]]
) -> list[tuple[int, float]]:
    """Return for each passage the answers to questions about it, and the sum of their verdicts."""
    words = [terms_of(passage) for _, passage in passages]
    counts = [Counter(passage_words) for passage_words in words]
    questions, right = [0] * len(passages), [0.0] * len(passages)
    for row in answers:
        gold = terms_of(row["expected"] or "")
        about = Counter(terms_of(f"{row['fact']} {row['expected'] or ''}"))

        def fit(i: int, gold: list[str] = gold, about: Counter[str] = about) -> tuple[bool, int]:
            return _stands_in(gold, words[i]), (about & counts[i]).total()

        best = max(range(len(passages)), key=fit, default=None)
        if best is not None and fit(best)[1]:
            questions[best] += 1
            right[best] += row["right"]
    return list(zip(questions, right, strict=True))


def _stands_in(part: Sequence[str], passage: Sequence[str]) -> bool:
    """Return whether the words of `part` stand one after another in `passage`; no words do not."""
    size = len(part)
    return bool(size) and any(
        list(passage[i : i + size]) == list(part) for i in range(len(passage) - size + 1)
    )
