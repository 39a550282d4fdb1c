"""Define the routes that generate: OpenAI's three, Anthropic's one, Tokasaurus' two.

body -> RequestHandler.begin -> pieces -> one reply, or chunks
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from starlette.types import Scope

from cartridge_forge.plugins.chat.wire.anthropic_messages import (
    CountTokensRequest,
    MessagesReply,
    MessagesRequest,
    TokenCount,
)
from cartridge_forge.plugins.chat.wire.detokenizer import TextPiece
from cartridge_forge.plugins.chat.wire.errors import (
    COUNT_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    AsciiJSON,
    ErrorAnswer,
)
from cartridge_forge.plugins.chat.wire.openai_chat import (
    ChatCompletion,
    SamplingFields,
    TextCompletion,
    usage,
)
from cartridge_forge.plugins.chat.wire.openai_responses import ResponsesReply, ResponsesRequest
from cartridge_forge.plugins.serve.apis.messages_api import MessagesWire
from cartridge_forge.plugins.serve.apis.responses_api import ResponsesWire
from cartridge_forge.plugins.serve.apis.tokasaurus import (
    CartridgeChatRequest,
    CartridgeCompletionRequest,
    CartridgeFields,
    ChatCompletionRequest,
    FingerprintFields,
    TextCompletionRequest,
    fingerprint,
)
from cartridge_forge.plugins.serve.handler import AnswerContext, Parse, RequestHandler
from cartridge_forge.plugins.serve.middleware import EventStream, while_connected
from cartridge_forge.plugins.serve.request_parsing import RequestParser
from cartridge_forge.plugins.serve.responses import (
    ChatWire,
    CompletionWire,
    Replies,
    echoed,
    joined,
)

Body = TypeVar("Body", bound=SamplingFields | ResponsesRequest | MessagesRequest)
# Of the reply's head, the text and bytes of tokens, and the request's top_logprobs.
Wire = Callable[[dict[str, Any], Callable[[int], tuple[str, list[int]]], int | None], Replies]
GRACE_SECONDS = 5.0  # beyond the deadline, for clients that read slowly
STATUSES = (400, 401, 403, 404, 408, 413, 421, 429, 500, 503, 504)
REFUSALS: dict[int | str, dict[str, Any]] = {s: {"model": ErrorAnswer} for s in STATUSES}
STREAM = {"text/event-stream": {"schema": {"type": "string"}}}


async def answer(
    handler: RequestHandler,
    request: Request,
    body: Body,
    parse: Parse[Body],
    wire: Wire,
) -> Response:
    """Return the whole reply or its stream; decoding ends when the client disconnects."""
    metrics, http = handler.metrics, handler.config.http
    if not body.stream:
        work = _whole(handler, request.scope, body, parse, wire)
        return await while_connected(request, metrics, work)
    answering = await while_connected(request, metrics, handler.begin(request.scope, body, parse))
    events = _events(handler, answering, body, wire)
    longest_s = http.deadline_s + GRACE_SECONDS
    return EventStream(
        events, answering.close, metrics, http.keep_alive_s, longest_s, answering.headers,
        request.url.path,
    )  # fmt: skip


async def _whole(
    handler: RequestHandler, scope: Scope, body: Body, parse: Parse[Body], wire: Wire
) -> Response:
    """Return the reply."""
    answering = await handler.begin(scope, body, parse)
    request = answering.request
    pieces: list[list[TextPiece]] = [[] for _ in range(request.responses)]
    try:
        async for choice, piece in answering.pieces():
            pieces[choice].append(piece)
    finally:
        await answering.close()
    more: dict[str, str] = {}
    used, top = answering.usage, request.top_logprobs
    packed = isinstance(body, FingerprintFields) and body.logprobs_in_fingerprint
    if packed or isinstance(body, CartridgeFields):
        more["system_fingerprint"] = fingerprint(answering.completions, packed, top)
        top = None if packed else top
    if isinstance(body, CartridgeFields):
        used = usage(used.prompt_tokens * request.n, used.completion_tokens)
    replies = wire(_head(answering), handler.config.texts.token, top)

    def response() -> Response:
        joined_pieces = [joined(p) for p in pieces]
        if request.echo:
            prompts = [p.echoed for p in request.prompts for _ in range(request.n) if p.echoed]
            joined_pieces = [*map(echoed, prompts, answering.completions, joined_pieces)]
        content = replies.whole(joined_pieces, used, answering.forge, **more)
        return AsciiJSON(content, headers=answering.headers)

    if not request.echo:
        return response()
    # Prompts may be long: they are written beside the event loop.
    return await asyncio.get_running_loop().run_in_executor(handler.parsing, response)


async def _events(
    handler: RequestHandler, answering: AnswerContext, body: Body, wire: Wire
) -> AsyncGenerator[dict[str, Any], None]:
    head, request = _head(answering), answering.request
    options = body.stream_options if isinstance(body, SamplingFields) else None
    if options is not None and options.include_usage:
        head["usage"] = None
    replies = wire(head, handler.config.texts.token, request.top_logprobs)
    for chunk in replies.opening(request.responses, answering.usage):
        yield chunk
    async with aclosing(answering.pieces()) as pieces:
        async for choice, piece in pieces:
            for chunk in replies.chunks(choice, piece, answering.forge):
                yield chunk
    for chunk in replies.closing(answering.usage, answering.forge):
        yield chunk


def _head(answering: AnswerContext) -> dict[str, Any]:
    request = answering.request
    return {"id": request.id, "created": answering.created, "model": request.model}


def routes(handler: RequestHandler) -> APIRouter:
    """Return the routes that generate."""
    router, parser = APIRouter(responses=REFUSALS), RequestParser

    @router.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses={200: {"content": STREAM}},
        summary="Answer a chat, with a cartridge and a strategy where they are named",
    )
    async def chat(request: Request, body: ChatCompletionRequest) -> Response:
        return await answer(handler, request, body, parser.chat, ChatWire)

    @router.post(
        "/v1/completions",
        response_model=TextCompletion,
        responses={200: {"content": STREAM}},
        summary="Go on with prompts of text or token ids",
    )
    async def completions(request: Request, body: TextCompletionRequest) -> Response:
        return await answer(handler, request, body, parser.completion, CompletionWire)

    @router.post(
        RESPONSES_PATH,
        response_model=ResponsesReply,
        responses={200: {"content": STREAM}},
        summary="OpenAI's Responses API, in its basic form: text and functions",
    )
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        return await answer(handler, request, body, parser.responses, partial(ResponsesWire, body))

    @router.post(
        MESSAGES_PATH,
        response_model=MessagesReply,
        responses={200: {"content": STREAM}},
        summary="Anthropic's Messages API, in its basic form: text and tools",
    )
    async def messages(request: Request, body: MessagesRequest) -> Response:
        return await answer(handler, request, body, parser.messages, MessagesWire)

    @router.post(COUNT_PATH, summary="Count a message's prompt tokens, as Anthropic's API does")
    async def count_tokens(request: Request, body: CountTokensRequest) -> TokenCount:
        messages_request = MessagesRequest(max_tokens=1, **dict(body))
        return TokenCount(input_tokens=await handler.count(request.scope, messages_request))

    @router.post("/v1/cartridge/chat/completions", include_in_schema=False)
    @router.post(
        "/custom/cartridge/chat/completions",
        response_model=ChatCompletion,
        summary="Tokasaurus' route: a chat with a cartridge of the library",
    )
    async def cartridge_chat(request: Request, body: CartridgeChatRequest) -> Response:
        return await answer(handler, request, body, parser.cartridge_chat, ChatWire)

    @router.post("/v1/cartridge/completions", include_in_schema=False)
    @router.post(
        "/custom/cartridge/completions",
        response_model=TextCompletion,
        summary="Tokasaurus' route: a prompt with a cartridge of the library",
    )
    async def cartridge_completions(request: Request, body: CartridgeCompletionRequest) -> Response:
        return await answer(handler, request, body, parser.cartridge_completion, CompletionWire)

    return router
