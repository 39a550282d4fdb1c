"""Convert the tokens of a response to text, up to a stop string. Pure.

Pieces never end inside a character, nor contain a stop string or the possible start of one.

    tokens -> TokenText -> StopFilter -> pieces of text, each with its tokens

The pieces' concatenation is the whole response, so streamed and whole replies are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from learning.decoding.stopping import Decode, TokenText
from protocols.types import Completion, TokenChunk
from protocols.wire.openai_chat import FinishReason


class StopFilter:
    """Pass text on up to the first stop string, independent of how the text is cut into pieces. The
    stop string that is completed first counts; of two that end at one place, the longer one. `cut`
    is where it begins, in characters from the start of the text; None until one was found."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._told = 0
        self.cut: int | None = None

    def feed(self, text: str) -> str:
        """Return the text that may be sent now."""
        if self.cut is not None:
            return ""
        held = self._held + text
        found = [(at + len(s), at) for s in self._stops if (at := held.find(s)) >= 0]
        if found:
            _, at = min(found)
            self.cut = self._told + at
            self._held = ""
            return self._tell(held[:at])
        keep = max((_beginning(held, s) for s in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return self._tell(held[: len(held) - keep])

    def flush(self) -> str:
        """Return the text that was held back, at the end of the response."""
        held, self._held = self._held, ""
        return self._tell(held)

    def _tell(self, text: str) -> str:
        self._told += len(text)
        return text


def _beginning(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next(
        (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[-n:])), 0
    )


@dataclass(frozen=True)
class TokenRecord:
    """Describe a token: its text begins at `offset` characters; `top` has the likeliest tokens."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True)
class TextPiece:
    """Hold the text to send next and its tokens; the last piece has `finish_reason`."""

    text: str
    tokens: tuple[TokenRecord, ...]
    finish_reason: FinishReason | None = None


class Detokenizer:
    """Turn the tokens of one response into pieces. `count` is the number of tokens read."""

    def __init__(self, decode: Decode, stops: Sequence[str], end_ids: frozenset[int]) -> None:
        self._said = TokenText(decode)
        self._filter = StopFilter(stops)
        self._end_ids = end_ids
        self._pending: list[TokenRecord] = []
        self._told = 0  # characters
        self.count = 0

    def feed(self, came: TokenChunk) -> TextPiece:
        """Return the piece that these tokens complete. Tokens read before are skipped, and so is a
        chunk behind a gap: the completion has all tokens."""
        text = ""
        skip = self.count - came.first
        if skip < 0:
            return TextPiece("", ())
        for i in range(skip, len(came.token_ids)):
            top = came.top_logprobs[i] if came.top_logprobs else ()
            token = TokenRecord(came.token_ids[i], came.logprobs[i], top, len(self._said.text))
            self.count += 1
            if self._filter.cut is None:
                self._pending.append(token)
                text += self._filter.feed(self._said.add(token.id))
        return self._piece(text, last=False)

    def finish(self, completion: Completion) -> TextPiece:
        """Return the rest of the response, with the finish reason "stop" or "length"."""
        came = TokenChunk(
            completion.request_id, 0, completion.token_ids, completion.logprobs,
            completion.top_logprobs,
        )  # fmt: skip
        rest = self.feed(came)
        text = rest.text
        if self._filter.cut is None:
            text += self._filter.feed(self._said.rest()) + self._filter.flush()
        stopped = self._filter.cut is not None or completion.finish_reason != "length"
        piece = self._piece(text, last=True)
        return TextPiece(text, rest.tokens + piece.tokens, "stop" if stopped else "length")

    def _piece(self, text: str, last: bool) -> TextPiece:
        self._told += len(text)
        cut = self._filter.cut
        if last and cut is None:
            told = [t for t in self._pending if t.id not in self._end_ids]
            self._pending = []
        else:
            told = [t for t in self._pending if t.offset < self._told]
            self._pending = self._pending[len(told) :]
        return TextPiece(text, tuple(told))
