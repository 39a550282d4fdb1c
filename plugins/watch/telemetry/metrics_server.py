"""Serve a registry of Prometheus metrics over HTTP, or to the members of a mesh alone by TLS.

The client library's own server shakes hands before it takes the next connection, so that one
silent client would stop every scrape.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from cartridge_forge.plugins.cluster.tls.listener import POLL_SECONDS, MutualTlsRequests

REQUEST_SECONDS = 30.0  # for a scraper to send its request


class MetricsListener(MutualTlsRequests, WSGIServer):
    """Listen on an IPv4 address, or a name that has one."""


class MetricsListener6(MetricsListener):
    """Listen on an IPv6 address."""

    address_family = socket.AF_INET6


class QuietRequests(WSGIRequestHandler):
    """Log no scrape: one comes every few seconds."""

    timeout = REQUEST_SECONDS

    def log_message(self, format: str, *args: object) -> None:
        pass


class MetricsServer:
    """Serve `registry` at `url` from a thread, until it is closed. `address` is host:port; port 0
    takes a free one. With `context` it admits TLS alone, by the context's rules. Raises OSError for
    an address that it cannot listen on."""

    def __init__(
        self,
        address: str,
        registry: CollectorRegistry,
        context: Callable[[], ssl.SSLContext] | None,
    ) -> None:
        host, _, port = address.rpartition(":")
        listener = MetricsListener6 if ":" in host else MetricsListener
        app = make_wsgi_app(registry)
        self._server = make_server(host.strip("[]"), int(port), app, listener, QuietRequests)
        self._server.context = context
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_SECONDS,), daemon=True
        )
        self._thread.start()
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop listening. A scrape in progress ends on its own thread."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
