"""Cut a document's text by tokens, at paragraphs or sentences where possible.

    text and its tokens' character spans -> TokenizedText -> pieces (cover every token)
                                                          -> a random chunk

Spans are exact: a chunk's text is `text[start_char:stop_char]`, and chunks without overlap
concatenate to the text.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import regex

from cartridge_forge.plugins.documents.words import CLOSING, PARAGRAPH_END, STRONG_END

# Ends of paragraphs, sentences, lines and words, best first.
BREAKS = (
    PARAGRAPH_END,
    regex.compile(rf"[.!?\u2026]{CLOSING}*\s+|{STRONG_END}\s*", regex.V1),
    regex.compile(r"\n"),
    regex.compile(r"\s+"),
)
SENTENCES = 2  # the kinds that a chunk may begin at: paragraphs and sentences
NEAR = 4  # a chunk that ends within 1/NEAR of its size before the document's end is extended to it


@dataclass(frozen=True)
class Chunk:
    """Describe a span of tokens [start, stop) and its characters [start_char, stop_char)."""

    start: int
    stop: int
    start_char: int
    stop_char: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


class TokenizedText:
    """Hold a text and the character spans [start, stop) of its tokens, in order. If several tokens
    make up a character, each has the character's span."""

    def __init__(self, text: str, offsets: Sequence[tuple[int, int]]) -> None:
        self.text = text
        self._starts = [start for start, _ in offsets]
        self._stops = [stop for _, stop in offsets]
        self._found: dict[int, list[int]] = {}  # by kind of break

    def __len__(self) -> int:
        return len(self._starts)

    def chunk(self, start: int, stop: int) -> Chunk:
        """Return tokens [start, stop) with the white space that follows them, so that no character
        is lost."""
        first = 0 if start == 0 else self._starts[start]
        last = len(self.text) if stop == len(self) else self._starts[stop]
        # A character whose tokens are cut apart belongs to both sides.
        return Chunk(start, stop, first, max(last, self._stops[stop - 1]))

    def around(self, start_char: int, stop_char: int) -> Chunk:
        """Return the tokens that hold these characters; the characters of the chunk are exactly
        these."""
        first = max(0, bisect_right(self._starts, start_char) - 1)
        last = max(first + 1, bisect_left(self._starts, stop_char))
        return Chunk(first, last, start_char, stop_char)

    def text_of(self, chunk: Chunk) -> str:
        return self.text[chunk.start_char : chunk.stop_char]

    def _breaks(self, kind: int) -> list[int]:
        """Return the tokens after a break of this kind, sorted. They are found on first use: a long
        text has many words and may need none of them."""
        if kind not in self._found:
            breaks = BREAKS[kind].finditer(self.text)
            tokens = (self._token_after(m.group(), m.end()) for m in breaks)
            self._found[kind] = sorted({token for token in tokens if token})
        return self._found[kind]

    def _token_after(self, broken: str, stop: int) -> int:
        """Return the first token after a break that ends at character `stop`: one that begins
        there, or the one that begins with its white space, as in many tokenizers; else 0."""
        token = bisect_left(self._starts, stop)
        if 0 < token < len(self) and self._stops[token - 1] <= stop:
            return token
        space = len(broken) - len(broken.rstrip())
        inside = token > 1 and self._starts[token - 1] >= stop - space
        return token - 1 if inside else 0

    def boundary(self, low: int, high: int) -> int:
        """Return the best cut in (low, high]: the last break of the best kind, else `high`."""
        break_token = self._last_break(low, high, len(BREAKS))
        if break_token is not None:
            return break_token
        for token in range(high, low, -1):  # at least between two characters
            if token == len(self) or self._stops[token - 1] <= self._starts[token]:
                return token
        return high

    def beginning(self, low: int, high: int) -> int:
        """Return the best start in [low, high]: a paragraph, a sentence, or the document's
        start."""
        token = self._last_break(low, high, SENTENCES)
        if token is not None or low <= 0:
            return token or 0
        return self.boundary(low, high)

    def _last_break(self, low: int, high: int, kinds: int) -> int | None:
        for kind in range(kinds):
            breaks = self._breaks(kind)
            last = bisect_right(breaks, high)
            if last and breaks[last - 1] > low:
                return breaks[last - 1]
        return None


def pieces(document: TokenizedText, size: int, overlap: int = 0) -> list[Chunk]:
    """Return chunks of at most `size` tokens that cover the document. Each chunk after the first
    overlaps the one before it by at most `overlap` tokens. The last is not left tiny. Raises
    ValueError unless 0 <= 2 * overlap < size."""
    if not 0 <= 2 * overlap < size:
        raise ValueError(f"overlap must be at least 0 and under half of size ({size}): {overlap}")
    chunks: list[Chunk] = []
    start, stop, count = 0, 0, len(document)
    while start < count:
        rest_tokens = count - start
        if rest_tokens <= size:
            stop = count
        else:
            most = size if rest_tokens >= 2 * size else -(-rest_tokens // 2)
            low = max(start + most // 2, stop)  # past the end of the piece before
            stop = document.boundary(low, max(start + most, stop + 1))
        chunks.append(document.chunk(start, stop))
        if stop == count:
            break
        start = max(stop - overlap, start + max(1, most // 2))
    return chunks


def random_chunk(document: TokenizedText, low: int, high: int, rng: random.Random) -> Chunk:
    """Return a chunk of `low` to `high` tokens, its size and place drawn uniformly and then moved
    to breaks nearby. A document of at most `low` tokens is one chunk."""
    count = len(document)
    size = rng.randint(min(low, count), min(high, count))
    drawn = rng.randint(0, count - size)
    start = document.beginning(drawn - size // 4, drawn)
    stop = start + size
    if count - stop <= size // NEAR and count - start <= high:
        return document.chunk(start, count)  # else its last words would be in no chunk
    least = max(min(low, size), size // 2)
    return document.chunk(start, document.boundary(start + least - 1, stop))
