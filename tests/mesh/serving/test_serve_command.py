"""`forge serve` as a user starts and ends it: nothing of it is left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import OpenAI

ROOT = Path(__file__).resolve().parents[3]

SERVE = str(ROOT / "meshes/serve.yaml")


@contextmanager
def served(directory: Path, *sets: str) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """The process, the server's URL, and the process group that a terminal would signal."""
    words = [f"library={directory / 'library'}", "http.listen=127.0.0.1:0", *sets]
    code = "import sys; from forge_run.cli import forge; sys.exit(forge())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", SERVE, *[w for s in words for w in ("--set", s)]],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        cwd=directory, env={**os.environ, "FORGE_TEST_SERVE": str(directory)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"on (http://\S+);", line):
                break
        else:
            pytest.fail("it did not start")
        yield process, found[1], process.pid
    finally:
        process.kill()
        process.communicate()


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
    with served(tmp_path, "roles.generator.replicas=1", "spares=0") as (process, url, group):
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
