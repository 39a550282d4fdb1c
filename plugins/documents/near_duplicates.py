"""Find training prompts that duplicate evaluation questions, and fail or warn where there are some.

Only texts about the same document are compared, because the same words about another document have
another answer. Every pair of similarity at least `alike` is found, and found exactly: such a pair
shares one of its rarest shingles, so only those are looked up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cartridge_forge.plugins.documents.filters import jaccard, normalised, rarest, shingles
from cartridge_forge.plugins.documents.words import words
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import json_lines, write_atomically

Rule = Literal["fail", "warn"]
TOLD = 5  # in an error message; the file has all of them


@dataclass(frozen=True)
class LocatedText:
    """Hold a text with its source: `LocatedText("salt", "Days in June?", "questions.json: a")`."""

    document: str
    text: str
    place: str


@dataclass(frozen=True)
class PromptOverlap:
    """Describe a training prompt that duplicates a question; `likeness` is the Jaccard similarity
    of their shingles."""

    kind: Literal["exact", "near"]
    likeness: float
    training: LocatedText
    question: LocatedText

    def __str__(self) -> str:
        how = "the words" if self.kind == "exact" else f"{self.likeness:.0%} like those"
        return (
            f"{self.training.place} ({_short(self.training.text)}) has {how} of "
            f"{self.question.place} ({_short(self.question.text)})"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def overlaps(
    training: Iterable[LocatedText], questions: Sequence[LocatedText], alike: float
) -> list[PromptOverlap]:
    """Return every pair about one document that differs at most in case, punctuation and spaces, or
    whose shingles have a Jaccard similarity of at least `alike`, in the order of the training
    texts.

    A repeated training text is reported once, at its first place. Texts without a word are skipped.
    """
    unique: dict[tuple[str, str], LocatedText] = {}
    for text in training:
        if words(text.text):
            unique.setdefault((text.document, normalised(text.text)), text)
    held_out = [(q, normalised(q.text), shingles(q.text)) for q in questions if words(q.text)]
    often = Counter(shingle for _, _, groups in held_out for shingle in groups)
    exact: dict[tuple[str, str], list[int]] = {}
    rare: dict[tuple[str, int], list[int]] = {}
    for i, (question, plain, groups) in enumerate(held_out):
        exact.setdefault((question.document, plain), []).append(i)
        for shingle in rarest(groups, alike, often):
            rare.setdefault((question.document, shingle), []).append(i)
    overlapping = []
    for (document, plain), text in unique.items():
        copies = exact.get((document, plain), [])
        overlapping += [PromptOverlap("exact", 1.0, text, held_out[i][0]) for i in copies]
        mine = shingles(text.text)
        candidates = {i for s in rarest(mine, alike, often) for i in rare.get((document, s), ())}
        for i in sorted(candidates.difference(copies)):
            likeness = jaccard(mine, held_out[i][2])
            if likeness >= alike:
                overlapping.append(PromptOverlap("near", likeness, text, held_out[i][0]))
    return overlapping


def _short(text: str) -> str:
    plain = " ".join(text.split())
    return repr(plain if len(plain) <= 60 else f"{plain[:57]}...")


def clean(overlapping: Sequence[PromptOverlap], rule: Rule, file: Path) -> None:
    """Write the duplicates to `file`, one JSON object a line, or remove it where there are none.

    Raises DataError with the first few when the rule is "fail".
    """
    if not overlapping:
        file.unlink(missing_ok=True)
        return
    write_atomically(file, json_lines(item.as_dict() for item in overlapping))
    if rule == "warn":
        return
    listing = "".join(f"\n  {item}" for item in overlapping[:TOLD])
    more = f"\n  and {len(overlapping) - TOLD} more" if len(overlapping) > TOLD else ""
    raise DataError(
        f"{len(overlapping)} training prompts double evaluation questions, so that the questions "
        f"would measure memory:{listing}{more}\nAll are in {file}; take them out of the rows or "
        "out of the questions, or set evaluate.contamination: warn "
        "(forge eval: --contamination warn)"
    )
