"""The routes that answer: OpenAI's two endpoints and Tokasaurus' two, all the same way.

body -> (a thread) asked -> Desk.begin -> pieces -> one answer, or a stream of chunks
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from serving.answering import Answering, Desk
from serving.answers import ChatWire, CompletionWire, joined
from serving.asked import Asked
from serving.errors import ErrorAnswer
from serving.http import EventStream, json_response, while_connected
from serving.reading import Reader
from serving.telling import Piece
from serving.wire_chat import ChatCompletion, ChatRequest
from serving.wire_common import SamplingFields, usage
from serving.wire_completions import CompletionRequest, TextCompletion
from serving.wire_tokasaurus import (
    CartridgeChatRequest,
    CartridgeCompletionRequest,
    CartridgeFields,
    fingerprint,
)

Body = TypeVar("Body", bound=SamplingFields)
GRACE_SECONDS = 5.0  # beyond the deadline, for who reads what was told slowly
STATUSES = (400, 401, 404, 408, 413, 429, 503, 504)
REFUSALS: dict[int | str, dict[str, Any]] = {s: {"model": ErrorAnswer} for s in STATUSES}
STREAM = {"text/event-stream": {"schema": {"type": "string"}}}


class Counter:
    """Reads, answers, streams. `reading` is where bodies are tokenised, never the event loop."""

    def __init__(self, desk: Desk, reader: Reader, reading: Executor, keep_alive_s: float) -> None:
        self._desk, self._reader, self._reading = desk, reader, reading
        self._keep_alive_s = keep_alive_s

    async def answer(
        self,
        request: Request,
        body: Body,
        read: Callable[[Body], Asked],
        kind: type[ChatWire] | type[CompletionWire],
    ) -> Response:
        """The whole answer, or its stream; nothing goes on once the client has left."""
        metrics = self._desk.metrics
        if not body.stream:
            whole = self._whole(body, read, kind)
            return json_response(await while_connected(request, metrics, whole))
        answering = await while_connected(request, metrics, self._begin(body, read))
        options = body.stream_options
        with_usage = bool(options is not None and options.include_usage)
        return EventStream(
            self._events(answering, kind, with_usage),
            answering.close,
            metrics,
            self._keep_alive_s,
            self._desk.deadline_s + GRACE_SECONDS,
        )

    async def _begin(self, body: Body, read: Callable[[Body], Asked]) -> Answering:
        loop = asyncio.get_running_loop()
        return await self._desk.begin(await loop.run_in_executor(self._reading, read, body))

    async def _whole(
        self,
        body: Body,
        read: Callable[[Body], Asked],
        kind: type[ChatWire] | type[CompletionWire],
    ) -> dict[str, Any]:
        answering = await self._begin(body, read)
        try:
            told: list[list[Piece]] = [[] for _ in range(answering.asked.responses)]
            async with aclosing(answering.pieces()) as pieces:
                async for choice, piece in pieces:
                    told[choice].append(piece)
        finally:
            await answering.close()
        more: dict[str, str] = {}
        used = answering.usage
        if isinstance(body, CartridgeFields):
            top = answering.asked.top_logprobs
            more["system_fingerprint"] = fingerprint(
                answering.completions, body.logprobs_in_fingerprint, top
            )
            used = usage(used.prompt_tokens * answering.asked.n, used.completion_tokens)
        wire = self._wire(kind, answering, body)
        return wire.whole([joined(p) for p in told], used, answering.forge, **more)

    async def _events(
        self, answering: Answering, kind: type[ChatWire] | type[CompletionWire], with_usage: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        wire = self._wire(kind, answering)
        if with_usage:
            wire.with_usage()
        for chunk in wire.opening(answering.asked.responses):
            yield chunk
        async with aclosing(answering.pieces()) as pieces:
            async for choice, piece in pieces:
                for chunk in wire.chunks(choice, piece, answering.forge):
                    yield chunk
        if with_usage:
            yield wire.closing(answering.usage)

    def _wire(
        self,
        kind: type[ChatWire] | type[CompletionWire],
        answering: Answering,
        body: SamplingFields | None = None,
    ) -> ChatWire | CompletionWire:
        asked = answering.asked
        packed = isinstance(body, CartridgeFields) and body.logprobs_in_fingerprint
        top = None if packed else asked.top_logprobs
        return kind(asked.id, asked.model, answering.created, self._desk.texts.token, top)


def routes(counter: Counter, reader: Reader) -> APIRouter:
    router = APIRouter(responses=REFUSALS)

    @router.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses={200: {"content": STREAM}},
        summary="Answer a chat, with a cartridge and a strategy where they are named",
    )
    async def chat(request: Request, body: ChatRequest) -> Response:
        return await counter.answer(request, body, reader.chat, ChatWire)

    @router.post(
        "/v1/completions",
        response_model=TextCompletion,
        responses={200: {"content": STREAM}},
        summary="Go on with prompts of text or token ids",
    )
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await counter.answer(request, body, reader.completion, CompletionWire)

    @router.post(
        "/custom/cartridge/chat/completions",
        response_model=ChatCompletion,
        summary="Tokasaurus' route: a chat with a cartridge of the library",
    )
    async def cartridge_chat(request: Request, body: CartridgeChatRequest) -> Response:
        return await counter.answer(request, body, reader.cartridge_chat, ChatWire)

    @router.post(
        "/custom/cartridge/completions",
        response_model=TextCompletion,
        summary="Tokasaurus' route: a prompt with a cartridge of the library",
    )
    async def cartridge_completions(request: Request, body: CartridgeCompletionRequest) -> Response:
        return await counter.answer(request, body, reader.cartridge_completion, CompletionWire)

    return router
