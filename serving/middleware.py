"""ASGI middleware around the routes: every request is counted, then let in, then read.

MetricsMiddleware -> ApiKeyMiddleware, where there is a key -> BodyLimitMiddleware -> the routes
"""

from __future__ import annotations

import asyncio
import hmac
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.errors import ApiError
from serving.metrics import ServingMetrics

OPEN = ("/health", "/ready", "/ping")  # answered without a key: they say nothing but how it stands
UPLOADS = "/admin/cartridges/"  # bodies that are files
BODY_SECONDS, UPLOAD_SECONDS = 30.0, 600.0  # a body comes within this
CLIENT_LEFT = 499  # the status that metrics have where nobody is left to be answered


class ClientDisconnected(ApiError):
    """The client left before its answer was whole: nobody is there to be told."""

    def __init__(self) -> None:
        super().__init__(CLIENT_LEFT, "the client left")


class MetricsMiddleware:
    """Count and time every request, by the route's own path and never by what was sent."""

    def __init__(self, app: ASGIApp, metrics: ServingMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, status = time.monotonic(), CLIENT_LEFT

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.answered(route, status, time.monotonic() - begun)


class ApiKeyMiddleware:
    """Let in who has the key. It is compared in constant time, and never logged."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        right = hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"
        if right or scope["path"] in OPEN:
            return await self._app(scope, receive, send)
        said = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
        await ApiError(401, said, code="invalid_api_key").response(scope, receive, send)


class BodyLimitMiddleware:
    """Let routes read bodies up to a size, uploads up to another, and within a time.

    Whoever reads more is raised ApiError 413, or 408; ClientDisconnected for half a body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_upload_bytes: int) -> None:
        self._app, self._max_bytes, self._max_upload_bytes = app, max_bytes, max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        upload = scope["path"].startswith(UPLOADS)
        most = self._max_upload_bytes if upload else self._max_bytes
        seconds = UPLOAD_SECONDS if upload else BODY_SECONDS
        deadline = asyncio.get_running_loop().time() + seconds
        said = f"the body is larger than {most} bytes; send less at a time"
        too_large = ApiError(413, said, code="body_too_large")
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > most:
            return await too_large.response(scope, receive, send)
        read, whole = 0, False

        async def limited() -> Message:
            nonlocal read, whole
            if whole:
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
            whole = not message.get("more_body")
            return message

        await self._app(scope, limited, send)
