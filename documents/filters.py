"""Which self-study texts are worth keeping: faults by name, doubles and near doubles.

Every function is deterministic: what is kept depends on the texts and their order alone.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

WORD = re.compile(r"\w+")
ECHO_WORDS = 12  # a run of so many words of the prompt is no turn of one's own
REPEATED = 4  # so often may a group of REPEAT_WORDS words stand in a text
REPEAT_WORDS = 4
SHINGLE = 3  # words
HASHES = 64
BANDS = 32  # of two hashes: pairs at 0.7 alike are missed with (1 - 0.7**2)**32 < 1e-9
PRIME = (1 << 61) - 1


@dataclass(frozen=True)
class TextBounds:
    """Words that a text may have, and how alike (Jaccard, of their shingles) two may be."""

    least_words: int = 3
    most_words: int = 400
    alike: float = 0.8


def fault(text: str, prompt: str, ended: bool, bounds: TextBounds) -> str | None:
    """Why a text is not kept, None if it is: "empty", "too_short", "too_long", "no_end" (cut off
    before its end), "echo" (of `prompt`, what its writer was told) or "repetition"."""
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
    """Whether ECHO_WORDS words in a row, or a shorter text as a whole, stand in the prompt."""
    length = min(ECHO_WORDS, len(words))
    there = {tuple(prompt[i : i + length]) for i in range(len(prompt) - length + 1)}
    return any(tuple(words[i : i + length]) in there for i in range(len(words) - length + 1))


def _repeats(words: Sequence[str]) -> bool:
    groups = Counter(
        tuple(words[i : i + REPEAT_WORDS]) for i in range(len(words) - REPEAT_WORDS + 1)
    )
    return bool(groups) and max(groups.values()) > REPEATED


def normalised(text: str) -> str:
    """Words in lower case: texts that differ in case, marks and spaces alone are the same."""
    return " ".join(WORD.findall(text.lower()))


def shingles(text: str) -> frozenset[int]:
    """Hashes of the groups of SHINGLE words of a text; of a shorter one, its words together."""
    words = WORD.findall(text.lower())
    groups = [words[i : i + SHINGLE] for i in range(max(1, len(words) - SHINGLE + 1))]
    return frozenset(_hash(" ".join(group)) for group in groups)


def jaccard(a: frozenset[int], b: frozenset[int]) -> float:
    """|a and b| / |a or b|; of two empty sets 1."""
    return len(a & b) / len(a | b) if a or b else 1.0


class DuplicateFilter:
    """Texts so far; `found` says whether a new one is among them, and takes it in if not.

    Candidates come from MinHash signatures (Broder, 1997) that agree in a band; each is then
    compared exactly, so that nothing is called a near double that is none.
    """

    def __init__(self, alike: float) -> None:
        self._alike = alike
        self._exact: set[str] = set()
        self._shingles: list[frozenset[int]] = []
        self._bands: dict[tuple[int, ...], list[int]] = {}

    def found(self, text: str) -> str | None:
        """ "double", "near_double" or None: then it is new, and known from now on."""
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
