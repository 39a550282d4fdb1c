"""The HTTP server of /metrics: standard library, one thread per scrape, closes without a rest."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from protocols.errors import SpecError

SILENCE_SECONDS = 2.0  # a client that connects and says nothing holds its thread no longer


class MetricsServer:
    """Answers GET /metrics at `url` from its own thread, from the start until `close`.

    Raises SpecError when the address ("host:port") cannot be listened on.
    """

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        host, _, port = address.rpartition(":")
        try:
            self._server = _server_class(host)((host.strip("[]"), int(port)), _Handler)
        except OSError as error:
            raise SpecError(
                f"telemetry.metrics: cannot listen on {address}: {error}; choose another address, "
                "127.0.0.1:0 for any free port, or null for no metrics"
            ) from error
        self._server.set_app(_only_metrics(make_wsgi_app(registry)))
        self.url = f"http://{host}:{self._server.server_port}/metrics"
        self._thread = Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and wait for the scrapes in progress: a few seconds at most."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = False  # server_close waits for its threads only if they are not daemons

    def server_bind(self) -> None:
        TCPServer.server_bind(self)
        # WSGIServer asks the name service for the host's full name here, which can take seconds.
        # Typed as for any address family; this one is bound to host and port.
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that hung up is not worth a word."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """A line per scrape would bury the run's own output."""


def _server_class(host: str) -> type[_Server]:
    return _Server6 if host.startswith("[") else _Server


def _only_metrics(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/metrics":
            start("404 Not Found", [("Content-Type", "text/plain")])
            return [b"only /metrics is here\n"]
        return app(environ, start)

    return answer
