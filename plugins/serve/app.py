"""Assemble the ASGI application: routes, middleware, and every error in OpenAI's format."""

from __future__ import annotations

import errno
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from cartridge_forge.plugins.chat.wire.errors import ApiError, AsciiJSON, bad_request
from cartridge_forge.plugins.serve.access.audit import AuditLog
from cartridge_forge.plugins.serve.access.keys import ApiKeyMiddleware, HostMiddleware, written_down
from cartridge_forge.plugins.serve.backend import ServerConfig
from cartridge_forge.plugins.serve.handler import RequestHandler
from cartridge_forge.plugins.serve.middleware import BodyLimitMiddleware, MetricsMiddleware
from cartridge_forge.plugins.serve.routes.admin import admin_routes
from cartridge_forge.plugins.serve.routes.generation import routes
from cartridge_forge.plugins.serve.routes.models import model_routes

# Fields of these APIs that are not served, with the remedy for each.
UNSERVED = {
    "allowed_token_ids": "send structured_outputs or response_format in its place",
    "audio": "text alone is served",
    "bad_words": "send logit_bias in its place",
    "background": "a response is waited for; leave it out",
    "best_of": "ask for n responses, or a strategy in forge.strategy",
    "chat_template": "the model's own is used, as its cartridges were trained with it",
    "continue_final_message": "no answer is gone on with; end with the user's message",
    "conversation": "no conversation is kept; send the whole of it as input",
    "documents": "add a document's cartridge, or send the text as a message",
    "function_call": "send tool_choice in its place",
    "functions": "send tools in its place",
    "ignore_eos": "a response ends at its end token; leave it out",
    "include": "leave it out",
    "include_stop_str_in_output": "a response ends before its stop string; leave it out",
    "length_penalty": "beams are not searched; name a strategy in forge.strategy instead",
    "max_tool_calls": "send parallel_tool_calls: false for one call",
    "min_tokens": "a response ends at its end token; leave it out",
    "modalities": "text alone is served",
    "prompt_logprobs": "send echo: true with logprobs to /v1/completions",
    "previous_response_id": "no response is kept; send the whole conversation as input",
    "reasoning": "name a strategy in forge.strategy instead",
    "return_token_ids": "send logprobs, or logprobs_in_fingerprint for ids",
    "return_tokens_as_token_ids": "send logprobs_in_fingerprint for ids",
    "skip_special_tokens": "text is replied without special tokens; leave it out",
    "store": "nothing is kept; leave it out, or send false",
    "suffix": "a response stands at the end; leave it out",
    "thinking_token_budget": "lower max_tokens instead",
    "thinking": "name a strategy in forge.strategy instead",
    "truncate_prompt_tokens": "nothing is cut; leave it out, and shorten the prompt",
    "truncation": "nothing is cut; leave it out, and shorten the input",
    "use_beam_search": "name a strategy in forge.strategy instead",
}
# Added by pydantic to the `loc` of a union, beside names of classes, which begin with a capital.
TYPES = ("str", "int", "float", "bool", "none")


@dataclass(frozen=True)
class Server:
    """Hold an application: `app` for the ASGI server, `api` for the OpenAPI schema. Call `close`
    after the last request."""

    app: ASGIApp
    api: FastAPI
    handler: RequestHandler

    async def close(self) -> None:
        await self.handler.close()


def create_server(config: ServerConfig) -> Server:
    """Return the application with its middleware, its routes and their resources."""
    http, handler = config.http, RequestHandler(config)
    api = FastAPI(
        title="Cartridge Forge",
        version="0.1.0",
        docs_url=None,
        redoc_url=None,
        default_response_class=AsciiJSON,
        exception_handlers={
            HTTPException: _refused(handler.audit), RequestValidationError: _malformed,
            RecursionError: _nested, OSError: _storage, Exception: _failed,
        },
    )  # fmt: skip
    for router in (routes(handler), model_routes(handler), admin_routes(handler)):
        api.include_router(router)
    app: ASGIApp = BodyLimitMiddleware(api, http)
    app = ApiKeyMiddleware(app, config.api_keys, handler.audit)
    if http.origins:
        app = CORSMiddleware(app, http.origins, allow_methods=["*"], allow_headers=["*"])
    app = HostMiddleware(app, http, handler.audit)
    return Server(MetricsMiddleware(app, handler.metrics), api, handler)


def _refused(audit: AuditLog) -> Callable[[Request, Exception], Coroutine[Any, Any, Response]]:
    """Return what answers an error of a route, once a right that is missing is in the audit log."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, ApiError):
            if error.status_code == 403:
                error = written_down(error, audit, request.scope)
            return error.response(request.url.path)
        assert isinstance(error, HTTPException)
        unknown = error.status_code == 404
        why = "there is no such route; see /openapi.json" if unknown else str(error.detail)
        return ApiError(error.status_code, why).response(request.url.path)

    return answer


async def _nested(request: Request, error: Exception) -> Response:
    deep = bad_request("the body nests too deeply; flatten it", None, "too_deep")
    return deep.response(request.url.path)


async def _malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # For a union, report the type whose validation got furthest: its `loc` is the longest, or, of
    # equal ones, the type fits and its value is wrong.
    faults = error.errors()
    mine = [f for f in faults if f["loc"][:2] == faults[0]["loc"][:2]]
    fault = max(mine, key=lambda f: (len(f["loc"]), not f["type"].endswith("_type")))
    return _of_body(fault).response(request.url.path)


async def _storage(request: Request, error: Exception) -> Response:
    """Answer where the library, or what is written beside it, cannot be read or written."""
    assert isinstance(error, OSError)
    if isinstance(error, TimeoutError | ConnectionError):
        return await _failed(request, error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "make room" if full else "make it readable"
    why = f"the library cannot be used: {error.strerror or 'an error of its disk'}; {remedy}"
    refusal = ApiError(
        507 if full else 503, f"{why} where the server runs", code="library_unusable"
    )
    return refusal.response(request.url.path)


async def _failed(request: Request, error: Exception) -> Response:
    why = ApiError(500, "an error of the server's own", code="internal_error")
    return why.response(request.url.path)


def _of_body(fault: dict[str, Any]) -> ApiError:
    """Convert pydantic's first error to an ApiError with the field, the fault and the remedy."""
    kind, message, location = fault["type"], fault["msg"], fault["loc"][1:]
    names = [
        part
        for position, part in enumerate(location, start=1)
        if isinstance(part, int)
        or (position == len(location) and kind == "extra_forbidden")  # as the client wrote it
        or (part.isidentifier() and not part[0].isupper() and part not in TYPES)
    ]
    if kind == "json_invalid":
        why = fault.get("ctx", {}).get("error", message)
        return bad_request(f"the body is no JSON: {why}", None, "invalid_json")
    if not names:
        return bad_request(
            "the body is a JSON object, sent as content-type: application/json", None
        )
    field = str(names[0])
    param = field + "".join(f"[{n}]" if isinstance(n, int) else f".{n}" for n in names[1:])
    if field in UNSERVED:
        return bad_request(f"{field} is not served: {UNSERVED[field]}", field, "unsupported")
    if kind == "extra_forbidden":
        return bad_request(
            f"{param or 'the empty name'} is no field of this request; remove it, or see "
            "/openapi.json",
            param,
            "unknown_field",
        )
    return bad_request(f"{param}: {message[:1].lower()}{message[1:]}", param)
