"""Clients that hold connections and send little: they lose their places, and nobody else does."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvicorn
from openai import OpenAI
from serving_setup import MODEL, Served, an_api_key, raw, serving, wait_until

from cartridge_forge.plugins.serve.access.connections import (
    HEAD_BYTES,
    MOST_SHAKING,
    SHAKING_PER_PEER,
    LimitedServer,
    TlsListener,
    limited,
)
from cartridge_forge.plugins.serve.spec import HttpSpec

HALF = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-never: "
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@contextlib.contextmanager
def connected(served: Served, count: int, sent: bytes) -> Iterator[list[socket.socket]]:
    """So many connections, each of which has sent these bytes."""
    host, _, port = served.url.removeprefix("http://").partition(":")
    with contextlib.ExitStack() as held:
        found = []
        for _ in range(count):
            one = held.enter_context(socket.create_connection((host, int(port)), timeout=20))
            with contextlib.suppress(OSError):  # ended already
                one.sendall(sent)
            found.append(one)
        yield found


def rest(one: socket.socket) -> bytes:
    """All that comes until the server closes."""
    with contextlib.suppress(ConnectionResetError):
        return b"".join(iter(lambda: one.recv(4096), b""))
    return b""


def is_open(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return one.recv(4096) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def healthy(served: Served) -> bool:
    return raw(served, "/health", method="GET")[0] == 200


@pytest.mark.parametrize("bound", ["max_connections", "max_connections_per_peer"])
def test_half_sent_headers_lose_their_places_to_who_asks(tmp_path: Path, bound: str) -> None:
    with serving(tmp_path, **{bound: 8}, header_s=600.0) as one:
        with connected(one, 60, HALF) as held:
            assert healthy(one)
            assert raw(one, "/v1/completions", {"model": MODEL, "prompt": "x"})[0] == 200
            wait_until(lambda: sum(map(is_open, held)) <= 8)
            assert [is_open(c) for c in held[:52]] == [False] * 52, "those that waited longest"
        wait_until(lambda: not one.server.server_state.connections)


def test_headers_have_a_deadline(tmp_path: Path) -> None:
    with serving(tmp_path, header_s=0.2) as one, connected(one, 20, HALF) as held:
        for late in held:
            assert rest(late).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("first", [b"", b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n"])
def test_so_has_a_connection_that_sends_nothing_or_nothing_more(
    tmp_path: Path, first: bytes
) -> None:
    with serving(tmp_path, header_s=0.2, idle_s=0.2) as one, connected(one, 1, first) as (silent,):
        assert rest(silent)[:12] == (b"HTTP/1.1 200" if first else b"HTTP/1.1 408")


def test_a_further_request_of_a_connection_has_a_deadline_too(tmp_path: Path) -> None:
    first = b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with serving(tmp_path, header_s=0.3) as one, connected(one, 1, first) as (slow,):
        assert slow.recv(4096).startswith(b"HTTP/1.1 200")
        slow.sendall(HALF)
        assert b"HTTP/1.1 408 " in rest(slow)


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "more"),
    [
        (b"GET /", b"a" * 1024),
        (HALF, b"a" * 1024),
        (b"GET /ping HTTP/1.1\r\nhost: localhost\r\n", b"x-more: " + b"a" * 1000 + b"\r\n"),
        (CHUNKED + b"0\r\n", b"x-more: " + b"a" * 1000 + b"\r\n"),
        (CHUNKED + b"2;", b"a" * 1024),
    ],
    ids=["line", "header", "headers", "trailers", "chunk extension"],
)
def test_a_request_that_never_gets_on_is_cut_off(tmp_path: Path, first: bytes, more: bytes) -> None:
    """Its headers and trailers would be kept in memory for as long as it sends."""
    with serving(tmp_path, header_s=600.0) as one, connected(one, 1, first) as (flood,):
        sent = 0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < 2**26:
                flood.sendall(more)
                sent += len(more)
        assert sent < 2**26, "it was read for ever"
        assert healthy(one)


def test_long_headers_are_told(tmp_path: Path) -> None:
    sent = b"GET /ping HTTP/1.1\r\nx-long: " + b"a" * (HEAD_BYTES + 1)
    with serving(tmp_path, header_s=600.0) as one, connected(one, 1, sent) as (long,):
        assert rest(long).startswith(b"HTTP/1.1 431 ")


def test_a_body_that_does_not_come_in_time(tmp_path: Path) -> None:
    sent = HEAD + b"content-length: 99\r\n\r\n{"
    with serving(tmp_path, body_s=0.2) as one, connected(one, 1, sent) as (slow,):
        answer = rest(slow)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"the body did not come within 0.2 s" in answer


def test_a_body_that_trickles_after_its_refusal_is_cut_off(tmp_path: Path) -> None:
    key = an_api_key("all", "sk-all")
    sent = HEAD + b"content-length: 9999\r\n\r\n{"
    with (
        serving(tmp_path, api_keys=(key,), body_s=0.2) as one,
        connected(one, 1, sent) as (slow,),
    ):
        assert slow.recv(4096).startswith(b"HTTP/1.1 401")
        slow.settimeout(0.05)
        gone: list[bool] = []

        def trickled() -> bool:
            try:
                slow.sendall(b" ")
                gone.append(slow.recv(4096) == b"")
            except TimeoutError:
                return False
            except OSError:
                return True
            return gone[-1]

        wait_until(trickled)


def test_an_answer_under_way_keeps_its_place(tmp_path: Path) -> None:
    with (
        serving(tmp_path, max_connections=2, header_s=600.0, ends=frozenset()) as one,
        OpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0) as client,
    ):
        one.backend.pause = 0.05
        streams = [
            client.completions.create(model=MODEL, prompt="x", max_tokens=40, stream=True)
            for _ in range(2)
        ]
        for stream in streams:
            next(stream)
        with connected(one, 10, HALF) as held:
            wait_until(lambda: not any(map(is_open, held)))
        with pytest.raises((OSError, http.client.HTTPException)):
            healthy(one)  # both places are busy
        one.backend.pause = 0.0
        assert [list(stream)[-1].choices[0].finish_reason for stream in streams] == ["length"] * 2
        wait_until(lambda: not one.server.server_state.tasks)
        assert healthy(one)


def test_descriptors_bound_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    soft = len(os.listdir("/proc/self/fd")) + 200
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    most = limited(HttpSpec())["http"].connections_open.most
    assert 110 <= most <= 130  # 200 - 64 - 16; others may open or close some meanwhile
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10**6, 10**6))
    assert limited(HttpSpec())["http"].connections_open.most == 1024


def test_a_big_body_is_refused_at_its_first_bytes(tmp_path: Path) -> None:
    with serving(tmp_path, max_body_bytes=2048) as one:
        status, _, content = raw(one, "/v1/completions", b" " * 5000)
        assert (status, json.loads(content)["error"]["code"]) == (413, "body_too_large")


def test_silent_clients_of_a_tls_listener_are_few_and_keep_nobody_out(
    tmp_path: Path,
) -> None:
    """Of a connection that has shaken no hands uvicorn tells nothing: the listener counts it."""
    authority = trustme.CA()
    pair = tmp_path / "pair.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(pair))
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    bounds = limited(HttpSpec(), MOST_SHAKING)
    bound = socket.create_server(("127.0.0.1", 0))
    address = bound.getsockname()
    listening = TlsListener(bound, bounds["http"].connections_open)
    server = LimitedServer(
        uvicorn.Config(app, lifespan="off", log_config=None, loop="asyncio",
                       ssl_certfile=str(pair), ssl_keyfile=str(pair), **bounds)
    )  # fmt: skip
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    serving.start()
    wait_until(lambda: server.started)
    with contextlib.ExitStack() as held:
        silent = [
            held.enter_context(socket.create_connection(address, timeout=20)) for _ in range(200)
        ]
        for _ in range(3):
            one = http.client.HTTPSConnection(*address, timeout=20, context=trusted)
            one.request("GET", "/")
            assert one.getresponse().status == 204
            one.close()
        wait_until(lambda: sum(map(is_open, silent)) < SHAKING_PER_PEER)
        assert all(map(is_open, silent[-SHAKING_PER_PEER + 3 :]))
    server.should_exit = True
    serving.join(20)
    listening.close()
