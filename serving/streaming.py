"""Work that ends with its client: whole answers, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.types import Receive, Scope, Send

from serving.errors import ApiError, plain_json
from serving.metrics import ServingMetrics
from serving.middleware import ClientDisconnected

T = TypeVar("T")
WAITING = ServerSentEvent(comment="waiting", sep="\n")
log = logging.getLogger("forge.serve")
AppStatus.disable_automatic_graceful_drain()  # streams have `http.drain_s` to end in


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait until they have ended, whatever their outcomes."""
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)


async def while_connected(
    request: Request, metrics: ServingMetrics, work: Coroutine[Any, Any, T]
) -> T:
    """Return the outcome of `work`. Cancels it and raises ClientDisconnected when the client
    leaves first."""
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        metrics.disconnected()
        raise ClientDisconnected
    finally:
        await end(task, left)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(EventSourceResponse):
    """Send events until `[DONE]`, an error's event, or the client's leaving.

    A comment goes out every `keep_alive_s` seconds. `close` is awaited however the stream ends,
    after `longest_s` seconds at the latest.
    """

    def __init__(
        self,
        events: AsyncGenerator[Any, None],
        close: Callable[[], Awaitable[None]],
        metrics: ServingMetrics,
        keep_alive_s: float,
        longest_s: float,
    ) -> None:
        super().__init__(
            self._encoded(events), ping=keep_alive_s, ping_message_factory=lambda: WAITING
        )
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
                    yield _event(event)
            last = b"data: [DONE]\n\n"
        except ApiError as error:
            last = _event(error.body)
        except Exception:
            log.exception("a stream failed")
            last = _event(ApiError(500, "an error of the server's own").body)
        yield last
        self._whole = True


def _event(content: Any) -> bytes:
    return b"data: " + plain_json(content) + b"\n\n"
