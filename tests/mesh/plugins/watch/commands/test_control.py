"""`forge status` and its like against a real control plane: what is printed, exit codes, which run
is found, and what is said when there is none."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_run_control import HISTORY, Served
from rooms.forge_run.control_setup import REPOSITORY

from cartridge_forge.plugins.watch.commands import control_client
from cartridge_forge.plugins.watch.commands.control_client import ControlClient, ControlTarget
from cartridge_forge.protocols.errors import ControlError


def test_a_reader_that_leaves_ends_the_stream_quietly(running: tuple[Path, Served]) -> None:
    path, here = running
    script = (
        "import sys; from cartridge_forge.forge_run.cli import forge; "
        f"sys.exit(forge(['events', {str(path)!r}, '--follow']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=REPOSITORY, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        for row in HISTORY:
            assert json.loads(process.stdout.readline()) == row
        process.stdout.close()
        here.do(here.steering.tell, HISTORY[0])
        assert process.wait(timeout=30) == 141
        assert process.stderr.read() == ""


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    "ask",
    [lambda c: c.checkpoint(), lambda c: next(c.events(1)), lambda c: c.status()],
    ids=["checkpoint", "events", "status"],
)
def test_a_server_that_never_answers_is_given_up(
    silent: str, ask: Callable[[ControlClient], object]
) -> None:
    assert control_client.CONNECT_SECONDS == 5.0
    with (
        ControlClient(ControlTarget(silent), connect_seconds=0.3) as client,
        pytest.raises(ControlError, match="cannot reach a control plane at 127"),
    ):
        ask(client)
