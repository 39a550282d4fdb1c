"""Convert pieces of responses to replies and stream chunks in OpenAI's format. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from cartridge_forge.plugins.chat.wire.detokenizer import CallPiece, TextPiece, TokenRecord
from cartridge_forge.plugins.chat.wire.openai_chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
    ForgeExtension,
    TextCompletion,
    TokenLogprob,
    TokenUsage,
    TopLogprob,
)
from cartridge_forge.plugins.chat.wire.openai_tools import AnsweredCall, AnsweredFunction
from cartridge_forge.plugins.serve.tokenization import EchoedPrompt
from cartridge_forge.protocols.step import Completion

Item = TypeVar("Item")
Missing = TypeVar("Missing")
LEAST = -9999.0  # for a token of probability 0: JSON has no infinity


def joined(pieces: Sequence[TextPiece]) -> TextPiece:
    """Return the pieces of one response as one piece."""
    tokens = tuple(t for p in pieces for t in p.tokens)
    calls: dict[int, CallPiece] = {}
    for new in (call for p in pieces for call in p.calls):
        call = calls.setdefault(new.index, new)
        if call is not new:
            calls[new.index] = replace(call, arguments=call.arguments + new.arguments)
    return replace(
        pieces[-1], text="".join(p.text for p in pieces), tokens=tokens, calls=tuple(calls.values())
    )


def unsaid(completion: Completion) -> Completion:
    """Return the completion of a request for no token, without the one that was sampled."""
    return replace(
        completion, token_ids=(), logprobs=(), versions=(), top_logprobs=(), finish_reason="length"
    )


def echoed(prompt: EchoedPrompt, completion: Completion, piece: TextPiece) -> TextPiece:
    """Return the piece of a whole response behind its prompt, with the prompt's tokens."""
    count = len(prompt.ids)
    logprobs = _behind_first(completion.prompt_logprobs, count, None)
    tops = _behind_first(completion.prompt_top_logprobs, count, ())
    read = map(TokenRecord, prompt.ids, logprobs, tops, prompt.offsets)
    tokens = (replace(t, offset=t.offset + len(prompt.text)) for t in piece.tokens)
    return replace(piece, text=prompt.text + piece.text, tokens=(*read, *tokens))


def _behind_first(values: Sequence[Item], count: int, missing: Missing) -> list[Item | Missing]:
    """Return `missing` for a prompt's first token, and the last `values` for the others of `count`;
    `missing` for all where there are no values."""
    tail = values[max(0, len(values) - count + 1) :]
    return [*[missing] * (count - len(tail)), *tail]


class Replies(Protocol):
    """Write the replies to one request, as a whole or as a stream's events."""

    def whole(
        self, pieces: Sequence[TextPiece], usage: TokenUsage, forge: ForgeExtension, **more: Any
    ) -> dict[str, Any]:
        """Return the reply to a request whose choices are `pieces`."""
        ...

    def opening(self, choices: int, usage: TokenUsage) -> list[dict[str, Any]]:
        """Return the events before the first piece; `usage` has what was read."""
        ...

    def chunks(self, choice: int, piece: TextPiece, forge: ForgeExtension) -> list[dict[str, Any]]:
        """Return the events of a piece of a choice."""
        ...

    def closing(self, usage: TokenUsage, forge: ForgeExtension) -> list[dict[str, Any]]:
        """Return the events after the last piece."""
        ...


class CompletionWire:
    """Write the replies to one completion request. `head` has id, created and model; in a stream
    with usage also `usage`, null except in the last chunk. `token` returns a token's text and
    bytes. `top` is the request's top_logprobs."""

    def __init__(
        self, head: dict[str, Any], token: Callable[[int], tuple[str, list[int]]], top: int | None
    ) -> None:
        self._head, self._token, self._top = head, token, top

    def whole(
        self, pieces: Sequence[TextPiece], usage: TokenUsage, forge: ForgeExtension, **more: Any
    ) -> dict[str, Any]:
        choices = [self._choice(i, piece) for i, piece in enumerate(pieces)]
        return self._plain(choices, usage=usage, forge=forge, **more)

    def opening(self, choices: int, usage: TokenUsage) -> list[dict[str, Any]]:
        return []

    def chunks(self, choice: int, piece: TextPiece, forge: ForgeExtension) -> list[dict[str, Any]]:
        """Return the piece's chunks; the extension field `forge` is sent with the finish reason."""
        ended = {} if piece.finish_reason is None else {"forge": forge}
        return [self._plain([self._choice(choice, piece)], **ended)]

    def closing(self, usage: TokenUsage, forge: ForgeExtension) -> list[dict[str, Any]]:
        """Return the chunk without choices that ends a stream with include_usage."""
        return [self._plain([], usage=usage)] if "usage" in self._head else []

    def _plain(self, choices: list[CompletionChoice], **more: Any) -> dict[str, Any]:
        fields = {**self._head, **more}
        return TextCompletion(object="text_completion", choices=choices, **fields).plain()

    def _choice(self, index: int, piece: TextPiece) -> CompletionChoice:
        logprobs = None
        if self._top is not None:
            logprobs = CompletionLogprobs(
                tokens=[self._token(t.id)[0] for t in piece.tokens],
                token_logprobs=[
                    None if t.logprob is None else max(t.logprob, LEAST) for t in piece.tokens
                ],
                top_logprobs=[self._likeliest(t) for t in piece.tokens],
                text_offset=[t.offset for t in piece.tokens],
            )
        reason = piece.finish_reason
        return CompletionChoice(
            index=index, text=piece.text, logprobs=logprobs, finish_reason=reason
        )

    def _likeliest(self, token: TokenRecord) -> dict[str, float] | None:
        """Map texts, the token's own too, to log-probabilities; equal texts: the likelier."""
        if token.logprob is None:
            return None
        likeliest: dict[str, float] = {}
        for other, logprob in [*token.top[: self._top], (token.id, token.logprob)]:
            likeliest.setdefault(self._token(other)[0], max(logprob, LEAST))
        return likeliest


class ChatWire(CompletionWire):
    """Write the replies to one chat request."""

    def __init__(
        self, head: dict[str, Any], token: Callable[[int], tuple[str, list[int]]], top: int | None
    ) -> None:
        super().__init__(head, token, top)
        self._templates: dict[int, dict[str, Any]] = {}  # chunks of text by choice

    def whole(
        self, pieces: Sequence[TextPiece], usage: TokenUsage, forge: ForgeExtension, **more: Any
    ) -> dict[str, Any]:
        choices = [
            ChatChoice(
                index=i,
                message=_message(piece),
                logprobs=self._logprobs(piece),
                finish_reason=piece.finish_reason or "stop",
            )
            for i, piece in enumerate(pieces)
        ]
        more |= {**self._head, "usage": usage, "forge": forge}
        return ChatCompletion(object="chat.completion", choices=choices, **more).plain()

    def opening(self, choices: int, usage: TokenUsage) -> list[dict[str, Any]]:
        """Return the first chunk of each choice, which has the role."""
        first = AnswerMessage(role="assistant", content="")
        return [self._chunk(i, first) for i in range(choices)]

    def chunks(self, choice: int, piece: TextPiece, forge: ForgeExtension) -> list[dict[str, Any]]:
        chunks = []
        if self._top is not None and (piece.text or piece.tokens):
            delta = AnswerMessage(content=piece.text)
            chunks.append(self._chunk(choice, delta, self._logprobs(piece)))
        elif piece.text:
            chunks.append(self._of_text(choice, piece.text))
        for call in piece.calls:
            chunks.append(self._chunk(choice, AnswerMessage(tool_calls=[_call_delta(call)])))
        if piece.finish_reason is not None:
            ended = self._chunk(choice, AnswerMessage(), reason=piece.finish_reason)
            chunks.append(ended | {"forge": forge.plain()})
        return chunks

    def closing(self, usage: TokenUsage, forge: ForgeExtension) -> list[dict[str, Any]]:
        head = {**self._head, "usage": usage}
        last = ChatChunk(object="chat.completion.chunk", choices=[], **head).plain()
        return [last] if "usage" in self._head else []

    def _chunk(
        self,
        index: int,
        delta: AnswerMessage,
        logprobs: ChatLogprobs | None = None,
        reason: FinishReason | None = None,
    ) -> dict[str, Any]:
        choice = ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)
        return ChatChunk(object="chat.completion.chunk", choices=[choice], **self._head).plain()

    def _of_text(self, index: int, text: str) -> dict[str, Any]:
        """Return a chunk of text alone. All of a choice differ in their text, and are validated
        once."""
        if index not in self._templates:
            self._templates[index] = self._chunk(index, AnswerMessage(content=""))
        chunk = self._templates[index]
        (choice,) = chunk["choices"]
        return chunk | {"choices": [choice | {"delta": choice["delta"] | {"content": text}}]}

    def _logprobs(self, piece: TextPiece) -> ChatLogprobs | None:
        if self._top is None:
            return None
        tokens = [
            TokenLogprob(
                **self._named(t.id, t.logprob),
                top_logprobs=[TopLogprob(**self._named(*o)) for o in t.top[: self._top]],
            )
            for t in piece.tokens
            if t.logprob is not None
        ]
        return ChatLogprobs(content=tokens, refusal=None)

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._token(token)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": data}


def _message(piece: TextPiece) -> AnswerMessage:
    """Return the message of a whole response; one of calls alone has no content."""
    content = None if piece.calls and not piece.text else piece.text
    if not piece.calls:
        return AnswerMessage(role="assistant", content=content, refusal=None)
    calls = [
        AnsweredCall(
            id=call.id, type="function",
            function=AnsweredFunction(name=call.name, arguments=call.arguments),
        )
        for call in piece.calls
    ]  # fmt: skip
    return AnswerMessage(role="assistant", content=content, refusal=None, tool_calls=calls)


def _call_delta(call: CallPiece) -> AnsweredCall:
    if call.name:
        function = AnsweredFunction(name=call.name, arguments=call.arguments)
        return AnsweredCall(index=call.index, id=call.id, type="function", function=function)
    return AnsweredCall(index=call.index, function=AnsweredFunction(arguments=call.arguments))
