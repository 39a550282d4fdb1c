"""Filter self-study texts: name their faults, and find duplicates and near duplicates.

Every function is deterministic: the result depends only on the texts and their order.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cartridge_forge.plugins.documents.words import unspaced, words

ECHO_WORDS = 12  # a text with so many words in a row from the prompt is an echo
REPEATED = 4  # how often a group of REPEAT_WORDS words may occur in a text
REPEAT_WORDS = 4
SHINGLE = 3  # words


@dataclass(frozen=True)
class TextBounds:
    """Bound a text's words, and the Jaccard similarity of two texts' shingles."""

    least_words: int = 3
    most_words: int = 400
    alike: float = 0.8


def fault(text: str, prompt: str, ended: bool, bounds: TextBounds) -> str | None:
    """Return why a text is rejected, None if it is kept: "empty", "too_short", "too_long", "no_end"
    (cut off before its end), "echo" (of `prompt`, which its writer read) or "repetition"."""
    terms = words(text.lower())
    if not terms:
        return "empty"
    characters = 2 if 2 * unspaced(text) > len(terms) else 1  # characters for a word
    if len(terms) < bounds.least_words:
        return "too_short"
    if len(terms) > bounds.most_words * characters:
        return "too_long"
    if not ended:
        return "no_end"
    if _repeats(terms, REPEAT_WORDS * characters):
        return "repetition"
    if echoes(terms, words(prompt.lower()), ECHO_WORDS * characters):
        return "echo"
    return None


def echoes(response: Sequence[str], prompt: Sequence[str], most: int = ECHO_WORDS) -> bool:
    """Return whether `most` words in a row, or a shorter text as a whole, occur in the prompt."""
    length = min(most, len(response))
    prompt_groups = {tuple(prompt[i : i + length]) for i in range(len(prompt) - length + 1)}
    return any(
        tuple(response[i : i + length]) in prompt_groups for i in range(len(response) - length + 1)
    )


def _repeats(response: Sequence[str], length: int) -> bool:
    groups = Counter(tuple(response[i : i + length]) for i in range(len(response) - length + 1))
    return bool(groups) and max(groups.values()) > REPEATED


def normalised(text: str) -> str:
    """Return the words in lower case: texts that differ only in case, punctuation and spaces are
    equal."""
    return " ".join(words(text.lower()))


def shingles(text: str) -> frozenset[int]:
    """Return hashes of a text's groups of SHINGLE words; of a shorter text, of all its words
    together."""
    terms = words(text.lower())
    groups = [terms[i : i + SHINGLE] for i in range(max(1, len(terms) - SHINGLE + 1))]
    return frozenset(_hash(" ".join(group)) for group in groups)


def jaccard(a: frozenset[int], b: frozenset[int]) -> float:
    """Return |a and b| / |a or b|; 1 for two empty sets."""
    return len(a & b) / len(a | b) if a or b else 1.0


def rarest(
    groups: frozenset[int], alike: float, often: Mapping[int, int] | None = None
) -> list[int]:
    """Return as many of a text's rarest shingles as ensure that any text of similarity at least
    `alike` has one of them among its own (Bayardo, Ma and Srikant, "Scaling up all pairs similarity
    search", 2007). `often` counts shingles; without it any fixed order serves."""
    least = math.ceil(alike * len(groups) - 1e-9)  # a similar text shares at least so many
    counts = often or {}
    return sorted(groups, key=lambda s: (counts.get(s, 0), s))[: len(groups) - least + 1]


class DuplicateFilter:
    """Keep texts so far; `found` checks a new one against them and adds it if it is no duplicate.
    Every text of similarity at least `alike` is found, and compared exactly."""

    def __init__(self, alike: float) -> None:
        self._alike = alike
        self._exact: set[str] = set()
        self._kept: dict[int, list[frozenset[int]]] = {}  # by each of a text's rarest shingles

    def found(self, text: str) -> str | None:
        """Return "double", "near_double", or None for a new text, which is added."""
        plain = normalised(text)
        if plain in self._exact:
            return "double"
        mine = shingles(text)
        rare = rarest(mine, self._alike)
        candidates = {other for shingle in rare for other in self._kept.get(shingle, ())}
        if any(jaccard(mine, other) >= self._alike for other in candidates):
            return "near_double"
        self._exact.add(plain)
        for shingle in rare:
            self._kept.setdefault(shingle, []).append(mine)
        return None


def _hash(text: str) -> int:
    data = text.encode()
    return zlib.crc32(data) << 29 ^ zlib.adler32(data)
