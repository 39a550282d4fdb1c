"""Tell which passages of a text, and which of its tokens, an edit changed.

old text, new text -> sentences and lines of both -> TextChange: the characters of each change
old ids, new ids                                  -> the places of each change in both
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import regex

from cartridge_forge.plugins.documents.words import LINE_END, SENTENCE_END

Span = tuple[int, int]
STOP = regex.compile(r"(?<=[.!?\u2026])\s+")
BETWEEN = "\n"  # of a text and what is appended to it
JOINED = "\n\n"  # of passages that are read as one text


@dataclass(frozen=True)
class TextChange:
    """Hold the characters [start, stop) of the old text that gave way to those of the new one.
    One of the two is empty where passages were added or removed."""

    old: Span
    new: Span


def appended(old: str, addition: str) -> str:
    """Return a text with another one behind it, on a line of its own."""
    return f"{old.rstrip()}{BETWEEN}{addition.strip()}"


def passage_spans(text: str) -> list[Span]:
    """Return the characters of each sentence of each line, without white space around it. In a
    line without capitals a sentence ends at each full stop before white space."""
    spans = []
    for first, last in _cut(text, 0, len(text), LINE_END):
        line = text[first:last]
        spans += _cut(text, first, last, STOP if line == line.lower() else SENTENCE_END)
    return spans


def _cut(text: str, start: int, stop: int, ends: regex.Pattern[str]) -> list[Span]:
    """Return what lies between the ends in a part of a text, without white space around it and
    without what has nothing else."""
    matches = list(ends.finditer(text, start, stop))
    edges = [start, *(edge for match in matches for edge in match.span()), stop]
    spans = []
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        part = text[first:last]
        if part.strip():
            begin = first + len(part) - len(part.lstrip())
            spans.append((begin, begin + len(part.strip())))
    return spans


def text_changes(old: str, new: str) -> list[TextChange]:
    """Return the changes between two texts, by whole passages, in order; none where the texts
    differ in white space between passages alone."""
    olds, news = passage_spans(old), passage_spans(new)
    matcher = _matcher([old[a:b] for a, b in olds], [new[a:b] for a, b in news])
    return [
        TextChange(_covered(olds, a, b), _covered(news, c, d))
        for tag, a, b, c, d in matcher.get_opcodes()
        if tag != "equal"
    ]


def _covered(spans: Sequence[Span], first: int, last: int) -> Span:
    """Return the characters of passages [first, last); where there are none, an empty span behind
    the passage before them."""
    if first < last:
        return spans[first][0], spans[last - 1][1]
    end = spans[first - 1][1] if first else 0
    return end, end


def changed_text(text: str, spans: Sequence[Span]) -> str:
    """Return the parts of a text at these spans as one text, without empty ones."""
    return JOINED.join(text[a:b] for a, b in spans if a < b)


def unchanged_text(text: str, spans: Sequence[Span]) -> str:
    """Return a text without the parts at these ascending spans."""
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    parts = (text[a:b].strip() for a, b in zip(edges[::2], edges[1::2], strict=True))
    return JOINED.join(part for part in parts if part)


def changed_ids(old: Sequence[int], new: Sequence[int]) -> list[tuple[Span, Span]]:
    """Return the places [start, stop) of each change in the old ids and in the new ones."""
    matcher = _matcher(old, new)
    return [
        ((a, b), (c, d)) for tag, a, b, c, d in matcher.get_opcodes() if tag != "equal"
    ]  # fmt: skip


def _matcher(old: Sequence[Any], new: Sequence[Any]) -> SequenceMatcher[Any]:
    """Return a matcher that starts a match at any item. By default it starts none at one that is
    over 1% of 200 items or more, as most tokens of a small vocabulary are."""
    return SequenceMatcher(None, old, new, autojunk=False)
