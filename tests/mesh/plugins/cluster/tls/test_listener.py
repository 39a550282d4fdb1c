"""Listeners of the standard library's servers: silent clients keep nobody out, and take no more
than a few threads of the process that they are in."""

from __future__ import annotations

import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from cartridge_forge.plugins.host.tls import certificates, read_identity
from cartridge_forge.plugins.host.tls_listener import MOST_CONNECTIONS
from cartridge_forge.plugins.watch.telemetry.prometheus import MetricsServer

SENT = {
    "nothing": b"",
    "half a request": b"GET /metrics HTTP/1.1\r\nx-never: ",
    "noise": b"\xff" * 9,
}


@pytest.fixture
def registry() -> CollectorRegistry:
    found = CollectorRegistry()
    Gauge("forge_step", "of the run", registry=found).set(7)
    return found


@pytest.fixture(params=["plain", "tls"])
def listening(
    request: pytest.FixtureRequest, registry: CollectorRegistry, tmp_path: Path
) -> Iterator[tuple[MetricsServer, ssl.SSLContext | None]]:
    context = client = None
    if request.param == "tls":
        [folder] = certificates(tmp_path / "certs", [("127.0.0.1",)])
        identity = read_identity(folder, "telemetry.tls")
        context, client = identity.server_context, identity.client_context()
    server = MetricsServer("127.0.0.1:0", registry, context)
    yield server, client
    server.close()


@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
def test_silent_clients_lose_their_places_to_who_asks(
    listening: tuple[MetricsServer, ssl.SSLContext | None], sent: bytes
) -> None:
    server, client = listening
    port = int(server.url.removesuffix("/metrics").rpartition(":")[2])
    before = threading.active_count()
    with ExitStack() as held:
        for _ in range(3 * MOST_CONNECTIONS):
            held.enter_context(socket.create_connection(("127.0.0.1", port), 20)).sendall(sent)
        with urllib.request.urlopen(server.url, timeout=60, context=client) as answer:
            assert b"forge_step 7.0" in answer.read()
        deadline = time.monotonic() + 60
        while threading.active_count() > before + MOST_CONNECTIONS:
            assert time.monotonic() < deadline, "a thread for each of them"
            time.sleep(0.02)
