"""meshes/documents.yaml over a folder of odd files: killed and resumed, it ends the same."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from documents_runs import command, directory
from small_run import run_to_end, running

from protocols.files import read_rows

pytestmark = [pytest.mark.timeout(900)]  # a busy machine starts it slowly


def test_a_run_that_was_killed_goes_on_to_the_same_end(
    over_documents: Path, odd_folder: Path, tmp_path: Path
) -> None:
    with running(command(tmp_path, odd_folder), tmp_path):
        wait_for(tmp_path, 5)  # the checkpoint of step 4 is there, and all are killed here
    process = run_to_end(command(tmp_path, odd_folder, "--resume"))
    assert process.returncode == 0, process.stdout + process.stderr
    again = directory(tmp_path)
    for name in ("metrics.jsonl", "rollouts.jsonl", "documents.json"):
        assert (again / name).read_bytes() == (over_documents / name).read_bytes(), name
    found = [json.loads((p / "results.json").read_text()) for p in (again, over_documents)]
    assert found[0]["arms"] == found[1]["arms"]


def wait_for(root: Path, step: int, timeout: float = 240.0) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        file = directory(root) / "metrics.jsonl"
        if any(row["step"] >= step for row in (read_rows(file) if file.exists() else [])):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} did not come within {timeout} s")
