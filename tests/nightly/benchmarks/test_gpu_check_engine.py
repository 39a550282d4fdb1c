"""The rows of a GPU's check that need vLLM, on a tiny shape and a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_replica import require_vllm

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_vllm_samples_what_the_trainer_scores_before_and_after_a_publish(tmp_path: Path) -> None:
    words = ["--tiny", "--device", "cpu", "--only", "engine", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words],
        capture_output=True,
        text=True,
        timeout=600,
    )
    rows = {r["name"]: r for r in json.loads((tmp_path / "tiny.json").read_text())["rows"]}
    assert len(rows) == 4, done.stdout + done.stderr
    assert not [row["error"] for row in rows.values() if row["error"]]
    assert rows["vLLM against the trainer"]["verdict"] == "ok"
    assert rows["hot swap"]["verdict"] == "ok"
    assert rows["hot swap"]["figures"]["crossed"]["mean"] > 0.5
