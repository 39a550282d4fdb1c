"""Clients that leave, queues that are full, deadlines, bodies that are too large."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from other_user import listeners, opened_by_nobody
from served import serve_command
from serving_setup import (
    MODEL,
    Served,
    raw,
    refused,
    serving,
    wait_until,
)

from cartridge_forge.services.proc_info import descendants


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("slow")
    limits = {"max_pending": 4, "deadline_s": 60.0, "max_body_bytes": 2048}
    with serving(directory, pause=0.02, ends=frozenset(), **limits) as one:
        yield one


LONG = {"model": MODEL, "prompt": [60, 77, 84], "max_tokens": 500, "logprobs": 0}


def never_ending(**more: Any) -> dict[str, Any]:
    """A request that samples for ten seconds, if nobody ends it."""
    return {**LONG, **more}


def test_every_request_has_a_deadline(tmp_path: Path) -> None:
    with (
        serving(tmp_path, pause=0.02, ends=frozenset(), deadline_s=1.0) as hasty,
        ThreadPoolExecutor(1) as other,
    ):
        begun = time.monotonic()
        streamed = other.submit(raw, hasty, "/v1/completions", never_ending(stream=True))
        status, _, message = refused(hasty, "/v1/completions", never_ending())
        _, _, content = streamed.result()
        assert (status, message.partition(";")[0]) == (504, "no whole answer within 1 s")
        assert time.monotonic() - begun >= 0.9
        wait_until(lambda: hasty.backend.decoding() == 0)
        assert hasty.backend.cancelled == 2
    last = content.decode().split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in content.decode()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_the_decoding(slow: Served, stream: bool) -> None:
    before = slow.backend.cancelled
    body = json.dumps(never_ending(stream=stream)).encode()
    host, _, port = slow.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        if stream:
            assert b"200 OK" in client.recv(4096)
        wait_until(lambda: slow.backend.decoding() == 1)
    # Long before its deadline, and before it would have ended by itself.
    wait_until(lambda: slow.backend.cancelled == before + 1)
    wait_until(lambda: slow.backend.decoding() == 0)
    wait_until(lambda: slow.door.handler.admission.pending == 0)


def disconnects(served: Served) -> float:
    lines = raw(served, "/metrics", method="GET")[2].decode().splitlines()
    return next(float(x.split()[1]) for x in lines if x.startswith("forge_serve_disconnects_total"))


def test_who_reads_a_stream_to_its_end_has_not_left(slow: Served) -> None:
    before = disconnects(slow)
    for _ in range(5):
        raw(slow, "/v1/completions", never_ending(stream=True, max_tokens=2))
    assert disconnects(slow) == before


def test_the_official_client_that_stops_reading(slow: Served) -> None:
    before, left = slow.backend.cancelled, disconnects(slow)
    with OpenAI(base_url=f"{slow.url}/v1", api_key="none") as client:
        with client.completions.create(**never_ending(stream=True)) as stream:
            next(iter(stream))
        wait_until(lambda: slow.backend.decoding() == 0)
    assert slow.backend.cancelled == before + 1
    assert disconnects(slow) == left + 1


def test_the_queue_is_bounded_and_says_when_to_come_again(slow: Served) -> None:
    with OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
        streams = [client.completions.create(**never_ending(stream=True)) for _ in range(4)]
        wait_until(lambda: slow.door.handler.admission.pending == 4)
        with pytest.raises(openai.RateLimitError) as full:
            client.completions.create(**never_ending())
        assert int(full.value.response.headers["retry-after"]) >= 1
        assert full.value.code == "queue_full"
        for stream in streams:
            stream.close()
        wait_until(lambda: slow.door.handler.admission.pending == 0)
        client.completions.create(model=MODEL, prompt=[60], max_tokens=1)


def test_bodies_too_large_and_too_torn(slow: Served) -> None:
    status, _, message = refused(slow, "/v1/completions", {**LONG, "user": "x" * 4096})
    assert (status, message) == (
        413, "the body is larger than 2048 bytes; send less at a time",
    )  # fmt: skip
    for torn in (b"", b"{", b'{"model": NaN', b"[1]", b'"x"', b"\xff\xfe", b"[" * 2000):
        status, _, content = raw(slow, "/v1/chat/completions", torn)
        assert (status, "error" in json.loads(content)) == (400, True)
    plain = {"content-type": "text/plain"}
    assert raw(slow, "/v1/completions", LONG, **plain)[0] == 400


def alive(directory: Path) -> list[str]:
    mark = f"FORGE_TEST_SERVE={directory}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(process.name)
        except OSError:
            continue
    return found


def wait_until_refused(url: str) -> None:
    """Return once the server takes no new connection."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), 1).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.02)
    pytest.fail("it goes on taking connections")


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_it_drains_and_leaves_no_process(tmp_path: Path, end: signal.Signals) -> None:
    with serve_command(tmp_path, "roles.generator.replicas=1", "spares=0") as (process, url, group):
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="clinic-reader", prompt="Who?", max_tokens=100, temperature=2, seed=1,
                stream=True,
            )  # fmt: skip
            chunks = [next(stream)]
            assert len(alive(tmp_path)) >= 2
            # A terminal's Ctrl-C reaches the whole process group.
            os.killpg(group, end) if end is signal.SIGINT else process.send_signal(end)
            wait_until_refused(url)
            chunks += list(stream)
            assert chunks[-1].choices[0].finish_reason in ("stop", "length"), "it was cut off"
        assert process.wait(60) == (130 if end is signal.SIGINT else 0)
    deadline = time.monotonic() + 60
    while alive(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(tmp_path) == []


def test_another_user_of_the_host_reaches_the_http_port_alone(tmp_path: Path) -> None:
    with serve_command(tmp_path) as (process, url, _):
        unix, ports = listeners([process.pid, *descendants(process.pid)])
        assert unix
        assert [name for name in unix if name.startswith("@")] == []
        if os.geteuid() == 0:
            assert opened_by_nobody(unix) == []
        assert ports == [int(url.rpartition(":")[2])]
