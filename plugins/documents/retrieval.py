"""Find the document that a question is about, by BM25 over words. No model reads anything.

    text -> count_terms -> the terms of a passage          (what a library keeps of a text)
    {name: passages} -> Bm25Router -> top(question, n) -> [(name, score), ...]
                                      choose(question) -> Choice: the best, and the runner-up
                                      update({name: passages, other: None})

A passage's score is the sum over the question's terms t of

    ln(1 + (N - n_t + 0.5) / (n_t + 0.5)) * c / (c + k1 * (1 - b + b * length / mean length))

where t stands c times in it and in n_t of the N passages. All but c and the length depends on the
other passages, so the index holds counts alone and each question computes the rest from them: a
changed document touches its own terms only, and one index serves any part of its names.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cartridge_forge.plugins.documents.words import words
from cartridge_forge.plugins.library.names import listing
from cartridge_forge.plugins.library.terms import Passages
from cartridge_forge.protocols.errors import DataError

K1 = 1.5  # how late a repeated term counts no more
B = 0.75  # how much a long passage is discounted
MASK = (1 << 32) - 1


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


class Bm25Router:
    """Rank names by their best passage for a question. The result depends on the passages and the
    question alone: neither on their order, nor on earlier ones, nor on the machine. One thread at a
    time may use it."""

    def __init__(self, passages: Mapping[str, Passages]) -> None:
        """Index the passages of each name. A name without a term is never found."""
        # Of each term the passages that have it, in any order: row << 32 | count.
        self._postings: dict[str, array[int]] = {}
        self._owners, self._lengths = array("i"), array("d")  # by row: a name's slot, and its terms
        self._free_rows: list[int] = []
        self._slots: dict[str, int] = {}
        self._called: list[str] = []  # by slot
        self._free_slots: list[int] = []
        self._rows: dict[str, array[int]] = {}
        self._terms: dict[str, tuple[str, ...]] = {}
        self.generation = 0  # grows with each change of the names
        self._sorted: tuple[str, ...] | None = None
        self.update(passages)

    @classmethod
    def of_texts(cls, texts: Mapping[str, str]) -> Bm25Router:
        """Return a router over whole texts by name, each one passage."""
        return cls({name: [count_terms(text)] for name, text in texts.items()})

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that are indexed, sorted."""
        if self._sorted is None:
            self._sorted = tuple(sorted(self._slots))
        return self._sorted

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    def update(self, passages: Mapping[str, Passages | None]) -> int:
        """Replace the passages of these names, or remove a name that has None. Returns how many
        postings were written; those of other names are kept."""
        writes = 0
        for name, texts in passages.items():
            if name in self._slots:
                writes += self._clear(name)
            if texts is not None:
                writes += self._add(name, texts)
            elif name in self._slots:
                self._free_slots.append(self._slots.pop(name))
                self._changed_names()
        return writes

    def _changed_names(self) -> None:
        self.generation += 1
        self._sorted = None

    def _add(self, name: str, passages: Passages) -> int:
        if name not in self._slots:
            if self._free_slots:
                self._slots[name] = self._free_slots.pop()
                self._called[self._slots[name]] = name
            else:
                self._slots[name] = len(self._called)
                self._called.append(name)
            self._changed_names()
        slot, rows, terms, writes = self._slots[name], array("i"), set[str](), 0
        by_term = self._postings
        for counts in filter(None, passages):
            if self._free_rows:
                row = self._free_rows.pop()
                self._owners[row], self._lengths[row] = slot, sum(counts.values())
            else:
                row = len(self._owners)
                self._owners.append(slot)
                self._lengths.append(sum(counts.values()))
            rows.append(row)
            high = row << 32
            for term, count in counts.items():
                postings = by_term.get(term)
                if postings is None:
                    postings = by_term[term] = array("q")
                postings.append(high | count)
            terms.update(counts)
            writes += len(counts)
        self._rows[name], self._terms[name] = rows, tuple(terms)
        return writes

    def _clear(self, name: str) -> int:
        """Remove the postings of a name's passages; returns how many they were."""
        rows, writes = self._rows.pop(name), 0
        removed = np.zeros(len(self._owners), dtype=bool)  # [rows]
        removed[rows] = True
        for term in self._terms.pop(name):
            postings = np.frombuffer(self._postings[term], np.int64)
            remaining = postings[~removed[postings >> 32]]
            writes += len(postings) - len(remaining)
            if len(remaining):
                self._postings[term] = array("q", remaining.tobytes())
            else:
                del self._postings[term]
        for row in rows:
            self._owners[row], self._lengths[row] = -1, 0.0
        self._free_rows.extend(rows)
        return writes

    def mask(self, names: Mapping[str, object] | set[str]) -> NDArray[np.bool_]:
        """Return [slots] which slots are of these names, for `top` until `generation` changes."""
        among = np.zeros(len(self._called), dtype=bool)
        among[[slot for name, slot in self._slots.items() if name in names]] = True
        return among

    def top(
        self, text: str, n: int, among: NDArray[np.bool_] | None = None
    ) -> list[tuple[str, float]]:
        """Return the best `n` names with their scores (above 0), best first, ties by name. Names
        that share no term with `text` are left out, so the list may be empty. `among` is a `mask`
        of names: the result is that of an index over them alone."""
        owners = np.frombuffer(self._owners, np.int32)  # [rows], -1 of a free one
        lengths = np.frombuffer(self._lengths, np.float64)  # [rows]
        present = None if among is None else among[owners] & (owners >= 0)  # [rows]
        total = len(owners) - len(self._free_rows) if present is None else int(present.sum())
        if not total:
            return []
        mean = float(lengths.sum() if present is None else lengths[present].sum()) / total
        scores = np.zeros(len(owners))  # [rows]
        for term, times in sorted(Counter(terms_of(text)).items()):
            if term not in self._postings:
                continue
            postings = np.frombuffer(self._postings[term], np.int64)
            rows, counts = postings >> 32, postings & MASK  # [passages that have it]
            if present is not None:
                permitted = present[rows]
                rows, counts = rows[permitted], counts[permitted]
            rarity = math.log(1 + (total - len(rows) + 0.5) / (len(rows) + 0.5))
            norm = K1 * (1 - B + B * lengths[rows] / mean)
            scores[rows] += times * rarity * counts / (counts + norm)
        matching = np.flatnonzero(scores)
        best = np.zeros(len(self._called))  # [slots]
        np.maximum.at(best, owners[matching], scores[matching])
        return self._ranked(best, n)

    def _ranked(self, best: NDArray[np.float64], n: int) -> list[tuple[str, float]]:
        slots = np.flatnonzero(best)
        if len(slots) > n > 0:
            slots = slots[best[slots] >= np.partition(best[slots], -n)[-n]]
        ranked = [(self._called[slot], float(best[slot])) for slot in slots.tolist()]
        return sorted(ranked, key=lambda pair: (-pair[1], pair[0]))[:n]

    def choose(self, text: str, among: NDArray[np.bool_] | None = None) -> Choice:
        """Return the best name and the runner-up. Raises DataError where no text shares a word."""
        ranked = self.top(text, 2, among)
        if not ranked:
            names = [n for n in self.names if among is None or among[self._slots[n]]]
            raise DataError(
                "the question shares no word with the text of a cartridge, so none is chosen for "
                f"it; name one: {listing(names) or 'none has its words'}"
            )
        best, *lower = ranked
        return Choice(*best, *(lower[0] if lower else ()))
