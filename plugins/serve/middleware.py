"""Wrap the routes in ASGI middleware, and end a reply when its client disconnects.

MetricsMiddleware -> hosts, origins and keys (serving.access.keys) -> BodyLimitMiddleware -> routes
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cartridge_forge.plugins.chat.wire.errors import (
    MESSAGES_PATH,
    RESPONSES_PATH,
    ApiError,
    plain_json,
)
from cartridge_forge.plugins.serve.access.connections import UPLOAD_SECONDS, UPLOADS
from cartridge_forge.plugins.serve.metrics import ServingMetrics
from cartridge_forge.plugins.serve.spec import HttpSpec

T = TypeVar("T")

CLIENT_LEFT = 499  # the status in metrics of a request whose client disconnected
NAMED = (RESPONSES_PATH, MESSAGES_PATH)  # routes whose events are named
WAITING = ServerSentEvent(comment="waiting", sep="\n")
log = logging.getLogger("forge.serve")
AppStatus.disable_automatic_graceful_drain()  # streams get `http.drain_s` seconds to end


class ClientDisconnected(ApiError):
    """Signal that the client disconnected before its reply was complete."""

    def __init__(self) -> None:
        super().__init__(CLIENT_LEFT, "the client left")


class MetricsMiddleware:
    """Count and time every request by the route's path template, never by the sent path."""

    def __init__(self, app: ASGIApp, metrics: ServingMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start, status = time.monotonic(), CLIENT_LEFT

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.answered(route, status, time.monotonic() - start)


class BodyLimitMiddleware:
    """Limit the size of request bodies, uploads separately, and the time in which they arrive.
    Reading more raises ApiError 413, or 408 when it is late; ClientDisconnected for an incomplete
    body."""

    def __init__(self, app: ASGIApp, http: HttpSpec) -> None:
        self._app, self._http = app, http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        upload = scope["method"] == "POST" and scope["path"].startswith(UPLOADS)
        most = self._http.max_upload_bytes if upload else self._http.max_body_bytes
        seconds = UPLOAD_SECONDS if upload else self._http.body_s
        deadline = asyncio.get_running_loop().time() + seconds
        why = f"the body is larger than {most} bytes; send less at a time"
        too_large = ApiError(413, why, code="body_too_large")
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > most:
            return await too_large.response(scope["path"])(scope, receive, send)
        read, complete = 0, False

        async def limited() -> Message:
            nonlocal read, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError as error:
                late = f"the body did not come within {seconds:g} s; send it faster"
                raise ApiError(408, late) from error
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            read += len(message.get("body", b""))
            if read > most:
                raise too_large
            complete = not message.get("more_body")
            return message

        await self._app(scope, limited, send)


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait until they have ended; their outcomes are ignored."""
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)


async def while_connected(
    request: Request, metrics: ServingMetrics, work: Coroutine[Any, Any, T]
) -> T:
    """Return the outcome of `work`. If the client disconnects first, cancel `work` and raise
    ClientDisconnected."""
    task, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        metrics.disconnected()
        raise ClientDisconnected
    finally:
        await end(task, disconnected)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(EventSourceResponse):
    """Send events until `[DONE]`, an error event, or the client's disconnect. The events of a route
    that names them have a type, which is their name, and no `[DONE]`. A comment is sent every
    `keep_alive_s` seconds. `close` is awaited however the stream ends, after `longest_s`
    seconds at the latest."""

    def __init__(
        self,
        events: AsyncGenerator[Any, None],
        close: Callable[[], Awaitable[None]],
        metrics: ServingMetrics,
        keep_alive_s: float,
        longest_s: float,
        headers: Mapping[str, str],
        path: str,
    ) -> None:
        self._path = path
        super().__init__(
            self._encoded(events), headers=headers, ping=keep_alive_s,
            ping_message_factory=lambda: WAITING,
        )  # fmt: skip
        self._close, self._metrics, self._longest_s = close, metrics, longest_s
        self._whole = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._longest_s):
                    await super().__call__(scope, receive, send)
            if not self._whole:
                self._metrics.disconnected()
        finally:
            await self._close()

    async def _encoded(self, events: AsyncGenerator[Any, None]) -> AsyncGenerator[bytes, None]:
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    yield self._event(event)
            last = b"" if self._path in NAMED else b"data: [DONE]\n\n"
        except ApiError as error:
            last = self._failed(error)
        except Exception:
            log.exception("a stream failed")
            last = self._failed(ApiError(500, "an error of the server's own"))
        yield last
        self._whole = True

    def _failed(self, error: ApiError) -> bytes:
        body = error.body(self._path)
        return self._event({"type": "error", **body} if self._path in NAMED else body)

    def _event(self, content: dict[str, Any]) -> bytes:
        name = f"event: {content['type']}\n" if self._path in NAMED else ""
        return name.encode() + b"data: " + plain_json(content) + b"\n\n"
