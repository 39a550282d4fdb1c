"""`forge status` and its like against a real control plane: what is printed, exit codes, which run
is found, and what is said when there is none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fake_run_control import HISTORY, Served, served

from forge_run.commands import control_client
from forge_run.commands.control_client import ControlClient, ControlTarget
from protocols.errors import ControlError
from protocols.spec.loading import load_spec
from protocols.spec.yaml_source import dump_yaml
from services.control.endpoints import (
    Endpoints,
    write_endpoints,
)
from services.run_directory import RunDirectory

REPOSITORY = Path(__file__).parents[4]


def new_run(root: Path, minute: int = 0, mesh: str = "tiny", sets: tuple[str, ...] = ()) -> Path:
    """A run's directory, begun at a minute of one hour; no process belongs to it."""
    spec = load_spec(str(REPOSITORY / "meshes/longhealth.yaml"), sets=sets).spec
    began = datetime(2026, 7, 26, 10, minute, tzinfo=UTC)
    return RunDirectory.create(root, mesh, dump_yaml(spec.as_dict()), began).path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that a user stands in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def running(home: Path) -> Iterator[tuple[Path, Served]]:
    """A run under runs/ that answers."""
    path = new_run(home / "runs", 30)
    with served(run=path.name) as here:
        write_endpoints(path, Endpoints(here.address, None, os.getpid()))
        yield path, here


def test_a_reader_that_leaves_ends_the_stream_quietly(running: tuple[Path, Served]) -> None:
    path, here = running
    script = (
        "import sys; from forge_run.cli import forge; "
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
