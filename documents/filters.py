"""Filter self-study texts: name their faults, and find duplicates and near duplicates.

Every function is deterministic: the result depends only on the texts and their order.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

WORD = re.compile(r"\w+")
ECHO_WORDS = 12  # a text with so many words in a row from the prompt is an echo
REPEATED = 4  # how often a group of REPEAT_WORDS words may occur in a text
REPEAT_WORDS = 4
SHINGLE = 3  # words
HASHES = 64
BANDS = 32  # of two hashes: a pair at 0.7 is missed with probability (1 - 0.7**2)**32 < 1e-9
PRIME = (1 << 61) - 1


@dataclass(frozen=True)
class TextBounds:
    """Bound a text's words, and the Jaccard similarity of two texts' shingles."""

    least_words: int = 3
    most_words: int = 400
    alike: float = 0.8


def fault(text: str, prompt: str, ended: bool, bounds: TextBounds) -> str | None:
    """Return why a text is rejected, None if it is kept: "empty", "too_short", "too_long", "no_end"
    (cut off before its end), "echo" (of `prompt`, which its writer read) or "repetition"."""
    words = WORD.findall(text.lower())
    if not words:
        return "empty"
    if len(words) < bounds.least_words:
        return "too_short"
    if len(words) > bounds.most_words:
        return "too_long"
    if not ended:
        return "no_end"
    if _repeats(words):
        return "repetition"
    if echoes(words, WORD.findall(prompt.lower())):
        return "echo"
    return None


def echoes(words: Sequence[str], prompt: Sequence[str]) -> bool:
    """Return whether ECHO_WORDS words in a row, or a shorter text as a whole, occur in the
    prompt."""
    length = min(ECHO_WORDS, len(words))
    there = {tuple(prompt[i : i + length]) for i in range(len(prompt) - length + 1)}
    return any(tuple(words[i : i + length]) in there for i in range(len(words) - length + 1))


def _repeats(words: Sequence[str]) -> bool:
    groups = Counter(
        tuple(words[i : i + REPEAT_WORDS]) for i in range(len(words) - REPEAT_WORDS + 1)
    )
    return bool(groups) and max(groups.values()) > REPEATED


def normalised(text: str) -> str:
    """Return the words in lower case: texts that differ only in case, punctuation and spaces are
    equal."""
    return " ".join(WORD.findall(text.lower()))


def shingles(text: str) -> frozenset[int]:
    """Return hashes of a text's groups of SHINGLE words; of a shorter text, of all its words
    together."""
    words = WORD.findall(text.lower())
    groups = [words[i : i + SHINGLE] for i in range(max(1, len(words) - SHINGLE + 1))]
    return frozenset(_hash(" ".join(group)) for group in groups)


def jaccard(a: frozenset[int], b: frozenset[int]) -> float:
    """Return |a and b| / |a or b|; 1 for two empty sets."""
    return len(a & b) / len(a | b) if a or b else 1.0


class DuplicateFilter:
    """Keep texts so far; `found` checks a new one against them and adds it if it is no duplicate.
    Candidates come from MinHash signatures (Broder, 1997) that agree in a band. Each is then
    compared exactly, so that there are no false near duplicates."""

    def __init__(self, alike: float) -> None:
        self._alike = alike
        self._exact: set[str] = set()
        self._shingles: list[frozenset[int]] = []
        self._bands: dict[tuple[int, ...], list[int]] = {}

    def found(self, text: str) -> str | None:
        """Return "double", "near_double", or None for a new text, which is added."""
        plain = normalised(text)
        if plain in self._exact:
            return "double"
        mine = shingles(text)
        bands = _bands(mine)
        near = {i for band in bands for i in self._bands.get(band, ())}
        if any(jaccard(mine, self._shingles[i]) >= self._alike for i in near):
            return "near_double"
        self._exact.add(plain)
        for band in bands:
            self._bands.setdefault(band, []).append(len(self._shingles))
        self._shingles.append(mine)
        return None


def _bands(mine: frozenset[int]) -> list[tuple[int, ...]]:
    signature = [min((a * x + b) % PRIME for x in mine) for a, b in _PERMUTATIONS]
    rows = HASHES // BANDS
    return [(b, *signature[b * rows : (b + 1) * rows]) for b in range(BANDS)]


def _hash(text: str) -> int:
    data = text.encode()
    return zlib.crc32(data) << 29 ^ zlib.adler32(data)


_PERMUTATIONS = [
    (_hash(f"minhash/a/{i}") % (PRIME - 1) + 1, _hash(f"minhash/b/{i}")) for i in range(HASHES)
]
