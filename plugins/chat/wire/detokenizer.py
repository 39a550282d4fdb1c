"""Convert the tokens of a response to text, up to a stop string. Pure.

Pieces never end inside a character, nor contain a stop string or the possible start of one.

    tokens -> TokenText -> StopFilter -> pieces of text, each with its tokens

The pieces' concatenation is the whole response, so streamed and whole replies are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cartridge_forge.plugins.chat.wire.openai_chat import FinishReason
from cartridge_forge.plugins.decoding.stopping import Decode, TokenText
from cartridge_forge.protocols.ports import TokenChunk
from cartridge_forge.protocols.step import Completion


class StopFilter:
    """Pass text on up to the first stop string, independent of how the text is cut into pieces. The
    stop string that is completed first counts; of two that end at one place, the longer one. `cut`
    is where it begins, None until one was found, and `stop` the string itself; `sent` is the number
    of characters passed on."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.sent = 0
        self.cut: int | None = None
        self.stop: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that may be sent now."""
        if self.cut is not None:
            return ""
        pending = self._held + text
        stops = [(at + len(s), at, s) for s in self._stops if (at := pending.find(s)) >= 0]
        if stops:
            _, at, self.stop = min(stops)
            self.cut, self._held = self.sent + at, ""
            return self._send(pending[:at])
        keep = max((longest_beginning(pending, s) for s in self._stops), default=0)
        self._held = pending[len(pending) - keep :]
        return self._send(pending[: len(pending) - keep])

    def flush(self) -> str:
        """Return the text that was held back, at the end of the response."""
        pending, self._held = self._held, ""
        return self._send(pending)

    def _send(self, text: str) -> str:
        self.sent += len(text)
        return text


def longest_beginning(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next(
        (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[-n:])), 0
    )


@dataclass(frozen=True)
class TokenRecord:
    """Describe a token: its text begins at `offset` characters; `top` has the likeliest tokens.
    `logprob` is None where nobody asked for it, and for the first token of a prompt, which nothing
    predicts."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True)
class CallPiece:
    """Hold what is new of the call `index` of a response: its id and name, then its arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class TextPiece:
    """Hold the text to send next, its tokens, and what is new of calls; the last piece has
    `finish_reason`, and `stop` where a stop string ended the text."""

    text: str
    tokens: tuple[TokenRecord, ...]
    finish_reason: FinishReason | None = None
    calls: tuple[CallPiece, ...] = ()
    stop: str | None = None


class Detokenizer:
    """Turn the tokens of one response into pieces. `count` is the number of tokens read. Those of
    `stop_ids`, with which a response ends, are not in its text."""

    def __init__(
        self,
        decode: Decode,
        stops: Sequence[str],
        end_ids: frozenset[int],
        stop_ids: Sequence[int] = (),
    ) -> None:
        self._text = TokenText(decode)
        self._filter = StopFilter(stops)
        self._end_ids, self._stop_ids = end_ids, frozenset(stop_ids)
        self._pending: list[TokenRecord] = []
        self.count = 0

    def feed(self, chunk: TokenChunk) -> TextPiece:
        """Return the piece that these tokens complete. Tokens read before are skipped, and so is a
        chunk behind a gap: the completion has all tokens."""
        text = ""
        skip = self.count - chunk.first
        if skip < 0:
            return TextPiece("", ())
        for i in range(skip, len(chunk.token_ids)):
            top = chunk.top_logprobs[i] if chunk.top_logprobs else ()
            logprob = chunk.logprobs[i] if chunk.logprobs else None
            token = TokenRecord(chunk.token_ids[i], logprob, top, len(self._text.text))
            self.count += 1
            if self._filter.cut is None and token.id not in self._stop_ids:
                self._pending.append(token)
                text += self._filter.feed(self._text.add(token.id))
        return TextPiece(text, self._sent_tokens())

    def rest_of(self, completion: Completion) -> TextPiece:
        """Return the piece that the tokens of a whole response complete, without its end."""
        return self.feed(
            TokenChunk(
                completion.request_id, 0, completion.token_ids, completion.logprobs,
                completion.top_logprobs,
            )
        )  # fmt: skip

    def finish(self, completion: Completion) -> TextPiece:
        """Return the rest of the response, with the finish reason "stop" or "length"."""
        text, tokens = (piece := self.rest_of(completion)).text, piece.tokens
        if self._filter.cut is not None:
            return TextPiece(text, tokens, "stop", stop=self._filter.stop)
        text += self._filter.feed(self._text.rest()) + self._filter.flush()
        if self._filter.cut is not None:
            more = tokens + self._sent_tokens()
            return TextPiece(text, more, "stop", stop=self._filter.stop)
        tokens += tuple(t for t in self._pending if t.id not in self._end_ids)
        return TextPiece(text, tokens, "length" if completion.finish_reason == "length" else "stop")

    def _sent_tokens(self) -> tuple[TokenRecord, ...]:
        """Return the pending tokens whose text has been sent, at least in part."""
        sent = tuple(t for t in self._pending if t.offset < self._filter.sent)
        del self._pending[: len(sent)]
        return sent
