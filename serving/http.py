"""What stands around the routes: keys, sizes, streams, clients that leave. Plain ASGI."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.errors import ApiError, plain_json
from serving.metrics import ServingMetrics

T = TypeVar("T")

OPEN = ("/health", "/ready", "/ping")  # answered without a key: they say nothing but how it stands
UPLOADS = "/admin/cartridges/"  # bodies that their route reads as they come, and counts
BODY_SECONDS = 30.0  # a body comes within this
CLIENT_LEFT = 499  # what metrics are told where nobody is left to be answered
DONE = b"data: [DONE]\n\n"
log = logging.getLogger("forge.serve")


class Gone(Exception):
    """The client left before its answer was whole: nobody is there to be told."""


def error_response(error: ApiError) -> Response:
    headers = dict(error.headers)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(error.body, error.status, headers)


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(plain_json(content), status, headers, media_type="application/json")


class Watch:
    """Counts and times every request, by the route's own path and never by what was sent."""

    def __init__(self, app: ASGIApp, metrics: ServingMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begun, status = time.monotonic(), CLIENT_LEFT

        async def seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, seen)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.answered(route, status, time.monotonic() - begun)


class Guard:
    """Lets in who has the key, where there is one. Compared in constant time, never logged."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app, self._key = app, None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._key is not None and scope["path"] not in OPEN:
            headers = dict(scope["headers"])
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            right = hmac.compare_digest(given.strip(), self._key)
            if scheme.lower() != b"bearer" or not right:
                error = ApiError(
                    401,
                    "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                    code="invalid_api_key",
                )
                return await error_response(error)(scope, receive, send)
        await self._app(scope, receive, send)


class Bodies:
    """Reads a body whole before its route, up to a size and within a time; 413 and 408 beyond."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(UPLOADS):
            return await self._app(scope, receive, send)
        try:
            body = await self._read(scope, receive)
        except ApiError as error:
            return await error_response(error)(scope, receive, send)
        except Gone:
            return None
        told = False

        async def again() -> Message:
            nonlocal told
            if told:
                return await receive()
            told = True
            return {"type": "http.request", "body": body, "more_body": False}

        return await self._app(scope, again, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._most:
            raise too_large(self._most)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    body += message.get("body", b"")
                    if len(body) > self._most:
                        raise too_large(self._most)
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError as error:
            raise ApiError(
                408, f"the body did not come within {BODY_SECONDS:g} s; send it at once"
            ) from error


def too_large(most: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than {most} bytes; send less at a time", code="body_too_large"
    )


async def while_connected(
    request: Request, metrics: ServingMetrics, work: Coroutine[Any, Any, T]
) -> T:
    """The outcome of `work`, which is cancelled when the client leaves first; then raises Gone."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        metrics.disconnected()
        raise Gone
    finally:
        await _end(task, left)


class EventStream(Response):
    """Server-sent events until `[DONE]`, an error's event, or the client's leaving. `close` is
    awaited however it ends. Where nothing is to be told for a while, a comment is."""

    def __init__(
        self,
        events: AsyncGenerator[Any, None],
        close: Callable[[], Awaitable[None]],
        metrics: ServingMetrics,
        keep_alive_s: float,
        longest_s: float,
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._events, self._close, self._metrics = events, close, metrics
        self._keep_alive_s, self._longest_s = keep_alive_s, longest_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        telling = asyncio.ensure_future(self._tell(send))
        left = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait(
                {telling, left}, timeout=self._longest_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not telling.done():
                self._metrics.disconnected()
        finally:
            await _end(telling, left)
            await self._close()

    async def _tell(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        try:
            async for event in _with_comments(self._events, self._keep_alive_s):
                await send({"type": "http.response.body", "body": event, "more_body": True})
            last = DONE
        except ApiError as error:
            last = _event(error.body)
        except Exception:
            log.exception("a stream failed")
            last = _event(ApiError(500, "an error of the server's own").body)
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _event(content: Any) -> bytes:
    return b"data: " + plain_json(content) + b"\n\n"


async def _with_comments(
    events: AsyncGenerator[Any, None], pause: float
) -> AsyncGenerator[bytes, None]:
    coming: asyncio.Future[Any] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(events))
            await asyncio.wait({coming}, timeout=pause)
            if not coming.done():
                yield b": waiting\n\n"
                continue
            try:
                event = coming.result()
            except StopAsyncIteration:
                return
            coming = None
            yield _event(event)
    finally:
        if coming is not None:
            await _end(coming)
        await events.aclose()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
