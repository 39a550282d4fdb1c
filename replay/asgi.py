"""The few words of ASGI that the servers on loopback say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


async def read_body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def respond(
    send: Send,
    status: int,
    body: bytes,
    headers: list[tuple[bytes, bytes]] | None = None,
    cut: bool = False,
) -> None:
    """A JSON answer; `cut`, half of it, after which the server ends the connection."""
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    head += headers or []
    await send({"type": "http.response.start", "status": status, "headers": head})
    sent = body[: len(body) // 2] if cut else body
    await send({"type": "http.response.body", "body": sent, "more_body": cut})


async def stream(send: Send, events: list[bytes], whole: bool) -> None:
    head = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    for event in events:
        await send({"type": "http.response.body", "body": event, "more_body": True})
    if whole:
        await send({"type": "http.response.body", "body": b"", "more_body": False})
