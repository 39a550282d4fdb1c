"""Assemble the ASGI application: routes, middleware, and every error in OpenAI's format."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from protocols.spec.services import LOOPBACK
from protocols.spec.serving import HttpSpec
from registry.store import CartridgeStore
from serving.admission import Admission
from serving.backend import Backend, StrategyCatalog
from serving.errors import ApiError, AsciiJSON, bad_request
from serving.handler import RequestHandler
from serving.metrics import ServingMetrics
from serving.middleware import ApiKeyMiddleware, BodyLimitMiddleware, MetricsMiddleware
from serving.request_parsing import RequestLimits, RequestParser
from serving.resident_cartridges import ResidentCartridges
from serving.routes import OpenAIRoutes, routes
from serving.routes_admin import admin_routes
from serving.routes_models import model_routes
from serving.tokenization import Tokenization

# Fields of OpenAI's API that are not served, with the remedy for each.
UNSERVED = {
    "audio": "text alone is served",
    "best_of": "ask for n responses, or a strategy in forge.strategy",
    "echo": "the prompt is not said again; leave it out",
    "frequency_penalty": "leave it out, or send 0",
    "function_call": "tools are not served; leave it out",
    "functions": "tools are not served; leave it out",
    "ignore_eos": "a response ends at its end token; leave it out",
    "logit_bias": "leave it out",
    "modalities": "text alone is served",
    "presence_penalty": "leave it out, or send 0",
    "reasoning_effort": "name a strategy in forge.strategy instead",
    "response_format": "text alone is served; leave it out",
    "suffix": "a response stands at the end; leave it out",
    "tool_choice": "tools are not served; leave it out",
    "tools": "tools are not served; leave it out",
}
TYPES = ("str", "int", "float", "bool", "none")  # added by pydantic to the `loc` of a union


@dataclass(frozen=True)
class ServerConfig:
    """Hold the parts of a server. With `key` None requests need no API key."""

    model: str
    backend: Backend
    texts: Tokenization
    library: CartridgeStore
    strategies: StrategyCatalog
    limits: RequestLimits
    end_ids: frozenset[int]
    http: HttpSpec
    held_cartridges: int = 16
    key: str | None = None
    draining: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Server:
    """Hold an application: `app` for the ASGI server, `api` for the OpenAPI schema. Call `close`
    after the last request."""

    app: ASGIApp
    api: FastAPI
    admission: Admission
    shelf: ResidentCartridges
    reading: ThreadPoolExecutor

    async def close(self) -> None:
        await self.shelf.close()
        self.reading.shutdown(wait=False, cancel_futures=True)


def create_door(house: ServerConfig) -> Server:
    """Return the application with its middleware, its routes and their resources."""
    http = house.http
    admission = Admission(http.max_pending)
    metrics = ServingMetrics(lambda: admission.pending, house.backend.depth)
    shelf = ResidentCartridges(house.backend, house.held_cartridges)
    desk = RequestHandler(
        house.backend, house.texts, shelf, admission, metrics, house.strategies, house.end_ids,
        http.deadline_s,
    )  # fmt: skip
    reader = RequestParser(
        house.model, house.texts, house.library, house.limits,
        lambda name: name in house.strategies.names(),
    )  # fmt: skip
    # One thread: a tokenizer is not thread-safe.
    reading = ThreadPoolExecutor(1, "reading")
    api = FastAPI(
        title="Cartridge Forge",
        version="0.1.0",
        docs_url=None,
        redoc_url=None,
        default_response_class=AsciiJSON,
        exception_handlers={
            HTTPException: _refused, RequestValidationError: _malformed, Exception: _failed,
        },
    )  # fmt: skip
    api.include_router(routes(OpenAIRoutes(desk, reading, http.keep_alive_s), reader))
    started = int(time.time())
    api.include_router(model_routes(desk, reader, house.library, started, house.draining))
    has_key, loopback = house.key is not None, http.listen.rpartition(":")[0] in LOOPBACK
    api.include_router(admin_routes(house.library, shelf, has_key=has_key, loopback=loopback))
    app: ASGIApp = BodyLimitMiddleware(api, http.max_body_bytes, http.max_upload_bytes)
    if house.key is not None:
        app = ApiKeyMiddleware(app, house.key)
    return Server(MetricsMiddleware(app, metrics), api, admission, shelf, reading)


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return error.response
    assert isinstance(error, HTTPException)
    unknown = error.status_code == 404
    said = "there is no such route; see /openapi.json" if unknown else str(error.detail)
    return ApiError(error.status_code, said).response


async def _malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # For a union, report the type whose validation got furthest: its `loc` is the longest.
    faults = error.errors()
    mine = [f for f in faults if f["loc"][:2] == faults[0]["loc"][:2]]
    return _of_body(max(mine, key=lambda f: len(f["loc"]))).response


async def _failed(request: Request, error: Exception) -> Response:
    return ApiError(500, "an error of the server's own", code="internal_error").response


def _of_body(fault: dict[str, Any]) -> ApiError:
    """Convert pydantic's first error to an ApiError with the field, the fault and the remedy."""
    names = [
        part
        for part in fault["loc"][1:]
        if isinstance(part, int) or (part.isidentifier() and part not in TYPES)
    ]
    kind, said = fault["type"], fault["msg"]
    if kind == "json_invalid":
        why = fault.get("ctx", {}).get("error", said)
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
            f"{param} is no field of this request; remove it, or see /openapi.json",
            param,
            "unknown_field",
        )
    return bad_request(f"{param}: {said[:1].lower()}{said[1:]}", param)
