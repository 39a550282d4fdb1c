"""Text from tokens as they come: whole characters only, the same text however the tokens come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
CONTEXT = 5  # tokens kept before the new ones: what a decoder may look back at
# A character that is not whole yet decodes to one replacement mark, or to one for each of its
# bytes, of which at most three can be there.
UNFINISHED = 3

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """One response's text. `length` is that of what was given out so far, characters.

    Only the last few tokens are decoded again, so a long response costs no more a token than a
    short one.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that were given out
        self.length = 0

    def feed(self, token_id: int) -> str:
        """The characters that are whole with this token, "" while one is not."""
        self._window.append(token_id)
        text = self._decode(self._window)
        marks = len(text) - len(text.rstrip(REPLACEMENT))
        return self._give(text, len(text) - min(marks, UNFINISHED))

    def flush(self) -> str:
        """What is left at the end: a replacement mark for a character that never became whole."""
        text = self._decode(self._window)
        return self._give(text, len(text))

    def _give(self, text: str, end: int) -> str:
        new = text[self._given : end]
        self._given = max(self._given, end)
        self.length += len(new)
        if self._given == len(text) and len(self._window) > 2 * CONTEXT:
            self._window = self._window[-CONTEXT:]
            self._given = len(self._decode(self._window))
        return new
