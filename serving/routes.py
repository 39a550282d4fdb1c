"""Define the routes that generate: two OpenAI endpoints and two Tokasaurus endpoints.

body -> (thread) ServingRequest -> RequestHandler.begin -> pieces -> one reply, or chunks
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from protocols.wire.openai_chat import (
    ChatCompletion,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    TextCompletion,
    usage,
)
from serving.detokenizer import TextPiece
from serving.errors import AsciiJSON, ErrorAnswer
from serving.handler import AnswerContext, RequestHandler
from serving.middleware import EventStream, while_connected
from serving.request import ServingRequest
from serving.request_parsing import RequestParser
from serving.responses import ChatWire, CompletionWire, joined
from serving.tokasaurus import (
    CartridgeChatRequest,
    CartridgeCompletionRequest,
    CartridgeFields,
    fingerprint,
)

Body = TypeVar("Body", bound=SamplingFields)
Kind = type[CompletionWire]
GRACE_SECONDS = 5.0  # beyond the deadline, for clients that read slowly
STATUSES = (400, 401, 404, 408, 413, 429, 503, 504)
REFUSALS: dict[int | str, dict[str, Any]] = {s: {"model": ErrorAnswer} for s in STATUSES}
STREAM = {"text/event-stream": {"schema": {"type": "string"}}}


@dataclass(frozen=True)
class OpenAIRoutes:
    """Parse, answer and stream. Bodies are tokenised on `reading`, never on the event loop."""

    desk: RequestHandler
    reading: Executor
    keep_alive_s: float

    async def answer(
        self,
        request: Request,
        body: Body,
        read: Callable[[Body], ServingRequest],
        kind: Kind,
    ) -> Response:
        """Return the whole reply or its stream; decoding ends when the client disconnects."""
        metrics = self.desk.metrics
        if not body.stream:
            whole = self._whole(body, read, kind)
            return AsciiJSON(await while_connected(request, metrics, whole))
        answering = await while_connected(request, metrics, self._begin(body, read))
        longest_s = self.desk.deadline_s + GRACE_SECONDS
        return EventStream(
            self._events(answering, body, kind), answering.close, metrics, self.keep_alive_s,
            longest_s,
        )  # fmt: skip

    async def _begin(self, body: Body, read: Callable[[Body], ServingRequest]) -> AnswerContext:
        loop = asyncio.get_running_loop()
        return await self.desk.begin(await loop.run_in_executor(self.reading, read, body))

    async def _whole(
        self, body: Body, read: Callable[[Body], ServingRequest], kind: Kind
    ) -> dict[str, Any]:
        answering = await self._begin(body, read)
        asked = answering.asked
        told: list[list[TextPiece]] = [[] for _ in range(asked.responses)]
        try:
            async for choice, piece in answering.pieces():
                told[choice].append(piece)
        finally:
            await answering.close()
        more: dict[str, str] = {}
        used, top = answering.usage, asked.top_logprobs
        if isinstance(body, CartridgeFields):
            packed = body.logprobs_in_fingerprint
            more["system_fingerprint"] = fingerprint(answering.completions, packed, top)
            used = usage(used.prompt_tokens * asked.n, used.completion_tokens)
            top = None if packed else top
        wire = kind(self._head(answering), self.desk.texts.token, top)
        return wire.whole([joined(p) for p in told], used, answering.forge, **more)

    async def _events(
        self, answering: AnswerContext, body: SamplingFields, kind: Kind
    ) -> AsyncGenerator[dict[str, Any], None]:
        head, options = self._head(answering), body.stream_options
        with_usage = options is not None and options.include_usage
        if with_usage:
            head["usage"] = None
        wire = kind(head, self.desk.texts.token, answering.asked.top_logprobs)
        for chunk in wire.opening(answering.asked.responses):
            yield chunk
        async with aclosing(answering.pieces()) as pieces:
            async for choice, piece in pieces:
                for chunk in wire.chunks(choice, piece, answering.forge):
                    yield chunk
        if with_usage:
            yield wire.closing(answering.usage)

    def _head(self, answering: AnswerContext) -> dict[str, Any]:
        asked = answering.asked
        return {"id": asked.id, "created": answering.created, "model": asked.model}


def routes(counter: OpenAIRoutes, reader: RequestParser) -> APIRouter:
    """Return the routes that generate."""
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
