"""Serve the members of a mesh alone, from any threaded server of the standard library."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any

HANDSHAKE_SECONDS = 3.0
MOST_CONNECTIONS = 32  # each has a thread and a descriptor of a process that has other work
POLL_SECONDS = 0.25  # between looks of a listener whether it shall end


class MutualTlsRequests(ThreadingMixIn):
    """Shake hands in the thread of each request, so that a silent client keeps nobody waiting. A
    connection beyond `most_connections` takes the place of the oldest.

    `context` makes the settings of one connection (`TlsIdentity.server_context`), whose files may
    have been renewed meanwhile; None for plain TCP.
    """

    daemon_threads = True
    most_connections = MOST_CONNECTIONS
    request_queue_size = 128  # of 5, a burst's further connections are tried again after a second
    context: Callable[[], ssl.SSLContext] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._open: dict[socket.socket, socket.socket] = {}  # as accepted -> as read from
        self._opened = threading.Lock()
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._opened:
            if len(self._open) >= self.most_connections:
                oldest = self._open.pop(next(iter(self._open)))
                with suppress(OSError):  # it has just ended
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = request
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._opened:
            self._open.pop(request, None)
        super().shutdown_request(request)  # type: ignore[misc]

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self.context is None:
            return super().finish_request(request, client_address)  # type: ignore[misc]
        request.settimeout(HANDSHAKE_SECONDS)
        secured = self.context().wrap_socket(
            request, server_side=True, do_handshake_on_connect=False
        )
        with secured:
            with self._opened:
                if request not in self._open:
                    return
                self._open[request] = secured
            secured.do_handshake()
            super().finish_request(secured, client_address)  # type: ignore[misc]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client without a certificate, or one that has left."""
