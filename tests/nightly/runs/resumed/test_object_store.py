"""A run that is kept in an S3 bucket whose server dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_server import S3Server, require_moto, s3_server
from small_run import Finished, command, rows, run_to_end, running, same_outcome

from cartridge_forge.forge_run.cli import forge

URL = "s3://runs/of/ours"


KEPT: dict[str, Any] = {"records.store": URL}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    require_moto()
    with s3_server() as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        yield found


def test_a_server_that_dies_holds_up_no_training(
    tmp_path: Path, server: S3Server, finished: Finished
) -> None:
    with running(command(tmp_path, **KEPT), tmp_path) as run:
        path = run.wait_for("on_policy", 1)
        server.end()
        said, _ = run.process.communicate(timeout=400)
    told = " ".join(said.split())
    assert run.process.returncode == 1, said
    assert f"the run goes on in {path}" in told
    assert f"the run is whole in {path}; make the store reachable" in told
    same_outcome(path, finished.path)

    with s3_server(server.port):  # and empty: nothing of the run is there
        again = run_to_end(command(tmp_path, "--resume", **KEPT))
        assert again.returncode == 0, again.stdout + again.stderr
        same_outcome(path, finished.path)
        third = tmp_path / "third"
        assert forge(["pull", f"{URL}/longhealth/{path.name}", "--run-dir", str(third)]) == 0
        same_outcome(third / "longhealth" / path.name, finished.path)
        assert rows(path / "metrics.jsonl")
