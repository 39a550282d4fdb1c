"""Find the document that a question is about, by BM25 over words. No model reads anything.

    text -> count_terms -> the terms of a passage          (what a library keeps of a text)
    {name: passages} -> Bm25Router -> top(question, n) -> [(name, score), ...]
                                      choose(question) -> Choice: the best, and the runner-up

How rare a term is depends on the other documents, so an index over one set cannot serve another.
Term counts can: an index over any set is built from them, in milliseconds.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from cartridge_forge.plugins.documents.words import words
from cartridge_forge.plugins.library.terms import Passages
from cartridge_forge.protocols.errors import DataError


def terms_of(text: str) -> list[str]:
    """Return a text's words in order, case folded. There is no stemming and no list of words left
    out: BM25 gives little weight to a word that most documents have."""
    return words(text.casefold())


def count_terms(text: str) -> dict[str, int]:
    """Return how often each term occurs in a text, sorted by term."""
    return dict(sorted(Counter(terms_of(text)).items()))


@dataclass(frozen=True)
class Choice:
    """Hold the best name for a question with its BM25 score, and the next best, None where no other
    shares a word with the question."""

    name: str
    score: float
    runner_up: str | None = None
    runner_up_score: float | None = None


def _empty_index() -> Any:
    """Return a new index of bm25s, which is imported for those alone who route."""
    # Its progress bars would make a semaphore, of which Python warns when the process is ended.
    os.environ.setdefault("DISABLE_TQDM", "1")
    # bm25s imports numba where vLLM has brought it: 70 MB and half a second, for a backend that is
    # not used here. None in its place fails the import as a missing package does.
    absent = "numba" not in sys.modules
    if absent:
        sys.modules["numba"] = None  # type: ignore[assignment]  # its stub knows modules alone
    try:
        from bm25s import BM25
    finally:
        if absent:
            del sys.modules["numba"]
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # its import makes it DEBUG
    return BM25()


class Bm25Router:
    """Rank names by their best passage for a question. The result depends on the passages and the
    question alone: neither on their order, nor on the machine."""

    def __init__(self, passages: Mapping[str, Passages]) -> None:
        """Index the passages of each name. A name without a term is never found."""
        self.names = tuple(sorted(passages))
        owned = [(name, counts) for name in self.names for counts in passages[name] if counts]
        self._owners = [name for name, _ in owned]
        self._ids = {t: i for i, t in enumerate(sorted({t for _, counts in owned for t in counts}))}
        self._index = _empty_index()
        if owned:
            ids = [
                [*chain.from_iterable(repeat(self._ids[t], n) for t, n in sorted(counts.items()))]
                for _, counts in owned
            ]
            self._index.index((ids, self._ids), create_empty_token=False, show_progress=False)

    @classmethod
    def of_texts(cls, texts: Mapping[str, str]) -> Bm25Router:
        """Return a router over whole texts by name, each one passage."""
        return cls({name: [count_terms(text)] for name, text in texts.items()})

    def top(self, text: str, n: int) -> list[tuple[str, float]]:
        """Return the best `n` names with their scores (above 0), best first, ties by name. Names
        that share no term with `text` are left out, so the list may be empty."""
        term_ids = [self._ids[term] for term in sorted(terms_of(text)) if term in self._ids]
        if not term_ids:
            return []
        best: dict[str, float] = {}
        scores = self._index.get_scores_from_ids(term_ids).tolist()
        for name, score in zip(self._owners, scores, strict=True):
            best[name] = max(score, best.get(name, 0.0))
        ranked = sorted(best.items(), key=lambda pair: (-pair[1], pair[0]))
        return [(name, score) for name, score in ranked if score > 0][:n]

    def choose(self, text: str) -> Choice:
        """Return the best name and the runner-up. Raises DataError where no text shares a word."""
        ranked = self.top(text, 2)
        if not ranked:
            raise DataError(
                "the question shares no word with the text of a cartridge, so none is chosen for "
                f"it; name one: {', '.join(self.names) or 'none has its words'}"
            )
        best, *lower = ranked
        return Choice(*best, *(lower[0] if lower else ()))
