"""`forge serve` as a user starts and ends it: nothing of it is left."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from openai import OpenAI
from other_user import listeners, opened_by_nobody
from served import serve_command

from cartridge_forge.services.proc_info import descendants


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
