"""Decode a response to text token by token, and find where its `StopCondition` ends it.

token -> TokenText (whole characters only) -> StopChecker -> None: continue
                                                             StopMatch: end, keep so many tokens
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import StopCondition

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how tokenizers write a character that is not yet whole


class TokenText:
    """Decode tokens one by one: `text` never ends in half a character.

    `ends[t]` is the length of the text with token t; a token that ends inside a character adds
    nothing until the character is whole. Tokens are decoded a few at a time, so that the cost of a
    token does not grow with the response.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        # Decoding starts at `_from`, whose text up to `_read` is known: a token's text can depend
        # on the one before it (a leading blank), but on no earlier one.
        self._from = self._read = 0
        self.text = ""
        self.ends: list[int] = []

    def add(self, token: int) -> str:
        """Return the text that the token adds."""
        self._ids.append(token)
        known_text = self._decode(self._ids[self._from : self._read])
        text = self._decode(self._ids[self._from :])
        new = ""
        if len(text) > len(known_text) and not text.endswith(UNFINISHED):
            new = text[len(known_text) :]
            self._from, self._read = self._read, len(self._ids)
        self.text += new
        self.ends.append(len(self.text))
        return new

    def rest(self) -> str:
        """Return the text held back at the end of a response, even if it is unfinished, and add it
        to `text`."""
        known_text = self._decode(self._ids[self._from : self._read])
        new = self._decode(self._ids[self._from :])[len(known_text) :]
        self._from = self._read = len(self._ids)
        self.text += new
        return new


@dataclass(frozen=True)
class StopMatch:
    """Describe the end of a response: how many of its tokens are kept, and which condition ended
    it."""

    keep: int
    by: str


class StopChecker:
    """Check one response after every token. Raises DataError for an invalid pattern."""

    def __init__(self, until: StopCondition, decode: Decode) -> None:
        self._until = until
        self._said = TokenText(decode)
        self._confidence: list[float] = []
        try:
            self._patterns = [re.compile(p) for p in until.patterns]
        except re.error as error:
            raise DataError(f"until.patterns holds no regular expression: {error}") from error

    def add(self, token: int, top: Sequence[float]) -> StopMatch | None:
        """Add a token; return the match that ends the response, or None. `top` are the largest
        log-probabilities at this position, at least `until.top` of them if `until.window` is
        set."""
        until, new = self._until, len(self._said.text)
        self._said.add(token)
        count = len(self._said.ends)
        if until.window:
            likeliest = top[: until.top]
            self._confidence.append(-sum(likeliest) / len(likeliest))
            if count >= until.window and self._mean() < until.floor:
                return StopMatch(count, "confidence")
        if count < until.after:
            return None
        # Before `after` tokens nothing was searched: then the whole text is new.
        since = 0 if count == until.after or until.before else new
        for string in until.strings:
            at = self._said.text.find(string, max(0, since - len(string) + 1))
            while at >= 0:
                if cut := self._cut(at, string):
                    return cut
                at = self._said.text.find(string, at + 1)
        for pattern in self._patterns:
            for match in pattern.finditer(self._said.text):
                if cut := self._cut(match.start(), pattern.pattern):
                    return cut
        return None

    def _mean(self) -> float:
        window = self._until.window
        return sum(self._confidence[-window:]) / window

    def _cut(self, start: int, by: str) -> StopMatch | None:
        """Return the end of the response for a match; None where too few tokens would be kept."""
        if not self._until.before:
            return StopMatch(len(self._said.ends), by)
        ends = [0, *self._said.ends]
        keep = next(t for t, end in enumerate(self._said.ends) if end > start)
        while keep and ends[keep] == ends[keep - 1]:  # tokens with the first bytes of a character
            keep -= 1
        return StopMatch(keep, by) if keep >= self._until.after else None
