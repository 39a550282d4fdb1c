"""Serve the members of a mesh alone, from any threaded server of the standard library."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any

HANDSHAKE_SECONDS = 3.0


class MutualTlsRequests(ThreadingMixIn):
    """Shake hands in the thread of each request, so that a silent client keeps nobody waiting.

    `context` makes the settings of one connection (`TlsIdentity.server_context`), whose files may
    have been renewed meanwhile; None for plain TCP.
    """

    daemon_threads = True
    context: Callable[[], ssl.SSLContext] | None = None

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self.context is None:
            return super().finish_request(request, client_address)  # type: ignore[misc]
        request.settimeout(HANDSHAKE_SECONDS)
        with self.context().wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)  # type: ignore[misc]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client without a certificate, or one that has left."""
