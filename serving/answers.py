"""Answers and chunks as OpenAI's clients read them, from what was told. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from serving.telling import Piece, ToldToken
from serving.wire_chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    TokenLogprob,
    TopLogprob,
)
from serving.wire_common import ForgeTold, Usage
from serving.wire_completions import CompletionChoice, CompletionLogprobs, TextCompletion

LEAST = -9999.0  # of a token that cannot come: JSON has no infinity

Token = Callable[[int], tuple[str, list[int]]]  # its text and its bytes


def joined(pieces: Sequence[Piece]) -> Piece:
    """The whole response."""
    tokens = tuple(t for p in pieces for t in p.tokens)
    return Piece("".join(p.text for p in pieces), tokens, pieces[-1].finish_reason)


class ChatWire:
    """One chat request's answers: `top` is asked.top_logprobs."""

    def __init__(self, id: str, model: str, created: int, token: Token, top: int | None) -> None:
        self._head: dict[str, Any] = {"id": id, "created": created, "model": model}
        self._token, self._top = token, top

    def with_usage(self) -> ChatWire:
        """Every chunk has `usage`, null but in the last one."""
        self._head["usage"] = None
        return self

    def whole(
        self, told: Sequence[Piece], usage: Usage, forge: ForgeTold, **more: Any
    ) -> dict[str, Any]:
        choices = [
            ChatChoice(
                index=i,
                message=AnswerMessage(role="assistant", content=piece.text, refusal=None),
                logprobs=self._logprobs(piece.tokens),
                finish_reason=_reason(piece.finish_reason) or "stop",
            )
            for i, piece in enumerate(told)
        ]
        return ChatCompletion(
            **self._head, object="chat.completion", choices=choices, usage=usage, forge=forge,
            **more,
        ).plain()  # fmt: skip

    def opening(self, choices: int) -> list[dict[str, Any]]:
        """The role of each choice, first."""
        return [self._chunk(i, Delta(role="assistant", content="")) for i in range(choices)]

    def chunks(self, choice: int, piece: Piece, forge: ForgeTold) -> list[dict[str, Any]]:
        """What the piece says; the extension field `forge` comes with the reason to end."""
        found = []
        if piece.text or piece.tokens:
            delta, logprobs = Delta(content=piece.text), self._logprobs(piece.tokens)
            found.append(self._chunk(choice, delta, logprobs))
        if piece.finish_reason is not None:
            ended = self._chunk(choice, Delta(), reason=piece.finish_reason)
            found.append(ended | {"forge": forge.plain()})
        return found

    def closing(self, usage: Usage) -> dict[str, Any]:
        """The chunk without choices that ends a stream with include_usage."""
        head = {**self._head, "usage": usage}
        return ChatChunk(**head, object="chat.completion.chunk", choices=[]).plain()

    def _chunk(
        self,
        index: int,
        delta: Delta,
        logprobs: ChatLogprobs | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        choice = ChunkChoice(
            index=index, delta=delta, logprobs=logprobs, finish_reason=_reason(reason)
        )
        return ChatChunk(**self._head, object="chat.completion.chunk", choices=[choice]).plain()

    def _logprobs(self, tokens: Sequence[ToldToken]) -> ChatLogprobs | None:
        if self._top is None:
            return None
        return ChatLogprobs(content=[self._told(t) for t in tokens], refusal=None)

    def _told(self, token: ToldToken) -> TokenLogprob:
        text, data = self._token(token.id)
        top = []
        for other, logprob in token.top[: self._top]:
            name, raw = self._token(other)
            top.append(TopLogprob(token=name, logprob=max(logprob, LEAST), bytes=raw))
        return TokenLogprob(
            token=text, logprob=max(token.logprob, LEAST), bytes=data, top_logprobs=top
        )


class CompletionWire:
    """One completion request's answers."""

    def __init__(self, id: str, model: str, created: int, token: Token, top: int | None) -> None:
        self._head: dict[str, Any] = {
            "id": id, "object": "text_completion", "created": created, "model": model,
        }  # fmt: skip
        self._token, self._top = token, top

    def with_usage(self) -> CompletionWire:
        """Every chunk has `usage`, null but in the last one."""
        self._head["usage"] = None
        return self

    def whole(
        self, told: Sequence[Piece], usage: Usage, forge: ForgeTold, **more: Any
    ) -> dict[str, Any]:
        choices = [self._choice(i, piece) for i, piece in enumerate(told)]
        return TextCompletion(
            **self._head, choices=choices, usage=usage, forge=forge, **more
        ).plain()

    def opening(self, choices: int) -> list[dict[str, Any]]:
        return []

    def chunks(self, choice: int, piece: Piece, forge: ForgeTold) -> list[dict[str, Any]]:
        """What the piece says; the extension field `forge` comes with the reason to end."""
        chunk = TextCompletion(**self._head, choices=[self._choice(choice, piece)]).plain()
        return [chunk if piece.finish_reason is None else chunk | {"forge": forge.plain()}]

    def closing(self, usage: Usage) -> dict[str, Any]:
        """The chunk without choices that ends a stream with include_usage."""
        return TextCompletion(**{**self._head, "usage": usage}, choices=[]).plain()

    def _choice(self, index: int, piece: Piece) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=piece.text,
            logprobs=self._logprobs(piece.tokens),
            finish_reason=_reason(piece.finish_reason),
        )

    def _logprobs(self, tokens: Sequence[ToldToken]) -> CompletionLogprobs | None:
        if self._top is None:
            return None
        return CompletionLogprobs(
            tokens=[self._token(t.id)[0] for t in tokens],
            token_logprobs=[max(t.logprob, LEAST) for t in tokens],
            top_logprobs=[self._likeliest(t) for t in tokens],
            text_offset=[t.offset for t in tokens],
        )

    def _likeliest(self, token: ToldToken) -> dict[str, float]:
        """By text, the token itself among them; of two with one text the likelier."""
        pairs = [*token.top[: self._top], (token.id, token.logprob)]
        likeliest: dict[str, float] = {}
        for other, logprob in pairs:
            likeliest.setdefault(self._token(other)[0], max(logprob, LEAST))
        return likeliest


def _reason(reason: str | None) -> Literal["stop", "length"] | None:
    return None if reason is None else "length" if reason == "length" else "stop"
