"""Bound the connections of a server and the time in which a request arrives, below ASGI.

    waiting   no request yet, a half-sent one, or none after the last answer
    busy      a whole request has arrived, and its answer has not been sent

A connection beyond a bound takes the place of the one that has waited longest, and is refused only
where all are busy. So clients that hold connections and send nothing cannot keep out one that sends
its request, as `GET /health` is. A connection that sends more than HEAD_BYTES without the end of
the headers or a part of the body is closed: the parser keeps headers and trailers in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections import Counter
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cartridge_forge.plugins.serve.spec import HttpSpec

UPLOADS = "/admin/cartridges/"  # routes whose bodies are files
UPLOAD_SECONDS = 600.0  # for such a body to arrive
SPARE_FILES = 64  # descriptors that stay free for files, generators, and connections being refused
# Connections that are accepted before the first of them is handled: they need descriptors too.
ACCEPTED_AT_ONCE = 16
BACKLOG = 1024  # connections that the kernel holds until they are accepted
HEAD_BYTES = 2**16  # of a request's line and headers; of trailers, and between parts of a body
MOST_SHAKING, SHAKING_PER_PEER = 64, 32  # connections whose handshake of TLS is not done
GRACE_SECONDS = 1.0  # the middleware's answer to a late body comes first
LATE, LONG = (
    b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % status
    for status in (b"408 Request Timeout", b"431 Request Header Fields Too Large")
)


class OpenConnections:
    """Count a server's connections, `most` in all and `per_peer` of one address, and keep those
    that wait in the order in which they began to."""

    def __init__(self, most: int, per_peer: int) -> None:
        self.most, self.per_peer = most, per_peer
        self.waiting: dict[LimitedProtocol, None] = {}
        self.peers: Counter[str] = Counter()
        self._shaking: dict[int, tuple[socket.socket, str]] = {}  # by descriptor, oldest first

    def begin_handshake(self, accepted: socket.socket, peer: str) -> None:
        """Count a connection that shakes hands, and end the oldest of its peer, or of all, where
        too many do."""
        shaking = {
            at: (one, address) for at, (one, address) in self._shaking.items() if one.fileno() == at
        }
        same_peer = [at for at, (_, address) in shaking.items() if address == peer]
        ended = same_peer[0] if len(same_peer) >= SHAKING_PER_PEER else next(iter(shaking), -1)
        if len(same_peer) >= SHAKING_PER_PEER or len(shaking) >= MOST_SHAKING:
            with contextlib.suppress(OSError):  # it has just ended
                shaking.pop(ended)[0].shutdown(socket.SHUT_RDWR)
        self._shaking = {**shaking, accepted.fileno(): (accepted, peer)}

    def end_handshake(self, descriptor: int) -> None:
        self._shaking.pop(descriptor, None)

    def make_room(self, peer: str) -> bool:
        """Return whether one more connection of `peer` fits, after ending one that waits."""
        if self.peers[peer] >= self.per_peer:
            return self._end_oldest(peer)
        return self.peers.total() < self.most or self._end_oldest(None)

    def _end_oldest(self, peer: str | None) -> bool:
        oldest = next((c for c in self.waiting if peer in (None, c.peer)), None)
        if oldest is not None:
            oldest.leave()
            oldest.transport.abort()
        return oldest is not None


class LimitedProtocol(HttpToolsProtocol):
    """Speak HTTP as uvicorn does, within `connections` and `http`'s times. Made by `limited`."""

    connections_open: OpenConnections
    http: HttpSpec

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._whole = False  # whether the last request's body has arrived
        self._since = 0  # bytes since the last end of headers or part of a body
        self._counted = False
        self.peer = self.client[0] if self.client else ""
        self.connections_open.end_handshake(transport.get_extra_info("socket").fileno())
        if not self.connections_open.make_room(self.peer):
            transport.abort()
            return
        self._counted = True
        self.connections_open.peers[self.peer] += 1
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self.leave()
        super().connection_lost(exc)

    def leave(self) -> None:
        """Give the place up, once."""
        self._stop_timer()
        self.connections_open.waiting.pop(self, None)
        if self._counted:
            self._counted = False
            peers = self.connections_open.peers
            peers[self.peer] -= 1
            if not peers[self.peer]:
                del peers[self.peer]

    def data_received(self, data: bytes) -> None:
        self._since += len(data)
        super().data_received(data)
        if self._since > HEAD_BYTES:
            self._refuse(LONG)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._whole:  # a further request of the connection
            self._wait_for_request()

    def on_headers_complete(self) -> None:
        self._since = 0
        super().on_headers_complete()
        upload = self.scope["method"] == "POST" and self.scope["path"].startswith(UPLOADS)
        seconds = UPLOAD_SECONDS if upload else self.http.body_s
        self._start_timer(seconds + GRACE_SECONDS)

    def on_body(self, body: bytes) -> None:
        self._since = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._since = 0
        super().on_message_complete()
        self._whole = True
        self._stop_timer()
        if not self.cycle.response_complete:  # an early answer: nothing is left to do
            self.connections_open.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        more = bool(self.pipeline)
        super().on_response_complete()
        if not more and not self.transport.is_closing():
            self.connections_open.waiting[self] = None

    def _wait_for_request(self) -> None:
        self._whole = False
        self.connections_open.waiting.setdefault(self)
        self._start_timer(self.http.header_s)

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._refuse, LATE)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, answer: bytes) -> None:
        """Close the connection, with this answer unless another is under way."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(answer)
        self.transport.close()


class TlsListener(socket.socket):
    """Take over a bound socket, and count what it accepts in `bounds` until hands are shaken: only
    then does uvicorn tell of a connection. For asyncio's own loop, which accepts by this class."""

    def __init__(self, bound: socket.socket, bounds: OpenConnections) -> None:
        super().__init__(fileno=bound.detach())
        self._bounds = bounds

    def accept(self) -> tuple[socket.socket, Any]:
        accepted, address = super().accept()
        self._bounds.begin_handshake(accepted, address[0])
        return accepted, address


class LimitedServer(uvicorn.Server):
    """Serve with `limited` settings. What the kernel queues is more than is accepted at once."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)


def limited(http: HttpSpec, shaking: int = 0) -> dict[str, Any]:
    """Return the settings of a `uvicorn.Config` that bound connections and times as `http` says.
    `shaking` descriptors stay free for connections that a TlsListener accepts."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = soft - len(os.listdir("/proc/self/fd")) - SPARE_FILES - ACCEPTED_AT_ONCE - shaking
    most = max(1, min(http.max_connections, free))
    bounds = OpenConnections(most, http.max_connections_per_peer)
    kind = type("LimitedProtocol", (LimitedProtocol,), {"connections_open": bounds, "http": http})
    return {"http": kind, "timeout_keep_alive": http.idle_s, "backlog": ACCEPTED_AT_ONCE}
