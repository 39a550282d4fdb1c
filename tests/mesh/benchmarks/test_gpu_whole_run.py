"""The main job of `benchmarks.gpu.whole_run`, on a small shape."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(300)
def test_all_roles_make_steps_over_random_weights(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    words = ["--tiny", "--steps", "2", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.whole_run", *words],
        capture_output=True, cwd=ROOT, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    steps = [e for e in record["events"] if e["event"] == "step"]
    ready = {e["role"] for e in record["events"] if e["event"] == "role_ready"}
    assert ready == {"generator", "doc_teacher", "trainer"}
    assert [e["step"] for e in steps] == [1, 2]
    for step in steps:
        assert step["documents"]["hits"] + step["documents"]["misses"] == 8
        assert step["bytes"]["cartridges"] > 0
    for row in record["metrics"]:
        assert row["stale_tokens"] == 0
        assert row["sampler_gap"]["tokens"] == row["tokens"] == 8 * 24
