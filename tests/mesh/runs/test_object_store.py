"""Runs that are kept in an S3 bucket: killed and gone on with elsewhere, and refused.
(tests/nightly/runs has a server that dies.)"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_server import S3Server, require_moto, s3_server
from small_run import Finished, command, latest, run_to_end, running, same_outcome

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.plugins.host.run_store import stored_runs
from cartridge_forge.plugins.host.stored_files import ObjectStore, read_state

URL = "s3://runs/of/ours"
KEPT: dict[str, Any] = {"records.store": URL}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    require_moto()
    with s3_server() as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        yield found


def checkpoints(server: S3Server) -> set[str]:
    """The checkpoints in the bucket."""
    found = stored_runs(ObjectStore(URL), "longhealth")
    files = read_state(found[-1].store, found[-1].within("controller")).files if found else {}
    return {name.split("/")[1] for name in files if name.startswith("checkpoints/")}


def test_a_killed_run_goes_on_on_another_machine_with_the_same_numbers(
    tmp_path: Path, server: S3Server, finished: Finished, capfd: pytest.CaptureFixture[str]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with running(command(here, **KEPT), here) as run:
        path = run.wait_for("on_policy", 5)
        while not checkpoints(server):
            assert run.process.poll() is None
        for pid in run.alive():
            os.kill(pid, signal.SIGKILL)
    assert server.environment["AWS_SECRET_ACCESS_KEY"] not in (path / "spec.yaml").read_text()
    shutil.rmtree(here)

    resumed = run_to_end(command(there, "--resume", "unfinished", **KEPT))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"fetching run {path.name} from {URL}" in " ".join(resumed.stdout.split())
    assert latest(there).name == path.name
    same_outcome(latest(there), finished.path)

    # All of it is in the store, and comes back whole.
    assert (
        forge(["pull", f"{URL}/longhealth/{path.name}", "--run-dir", str(tmp_path / "third")]) == 0
    )
    third = tmp_path / "third" / "longhealth" / path.name
    same_outcome(third, finished.path)
    for file in ("report.html", "events.jsonl", "spec.yaml"):
        assert (third / file).read_bytes() == (latest(there) / file).read_bytes()
    assert server.environment["AWS_SECRET_ACCESS_KEY"] not in resumed.stdout + resumed.stderr


def test_wrong_keys_and_no_bucket_are_refused_at_once(tmp_path: Path, server: S3Server) -> None:
    wrong = run_to_end(command(tmp_path, **{"records.store": "s3://of-nobody/runs"}))
    assert wrong.returncode == 1
    assert "records.store s3://of-nobody/runs: there is no such bucket" in " ".join(
        wrong.stderr.split()
    )
    server.check_keys()
    refused = run_to_end(command(tmp_path, **KEPT))
    assert refused.returncode == 1
    told = " ".join(refused.stderr.split())
    assert "refuses the credentials of the environment (InvalidAccessKeyId)" in told
    assert server.environment["AWS_SECRET_ACCESS_KEY"] not in refused.stdout + refused.stderr
    assert "Traceback" not in refused.stderr
