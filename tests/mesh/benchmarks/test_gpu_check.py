"""The check of a GPU on a tiny shape and a CPU: every row runs, so that none rots unseen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.correctness import SPREADS
from benchmarks.gpu.rows import FAILED, NOT_RUN


def test_every_row_but_vllm_s_runs_on_a_cpu(tmp_path: Path) -> None:
    words = ["--tiny", "--device", "cpu", "--only", "correctness", "costs", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words],
        capture_output=True,
        text=True,
        timeout=300,
    )
    record = json.loads((tmp_path / "tiny.json").read_text())
    rows = {row["name"]: row for row in record["rows"]}
    # A bound of seconds says nothing of a loaded CPU; every other one holds here too.
    timed = {"publish, one cartridge", "first step"}
    bad = {n for n, row in rows.items() if row["verdict"] in (FAILED, NOT_RUN)} - timed
    assert not bad, done.stdout + done.stderr
    assert not [row["error"] for row in rows.values() if row["error"]]
    assert len(rows) == len(SPREADS) + 4 + 9
    lines = (tmp_path / "tiny.md").read_text().splitlines()
    assert lines[2] == "| row | wanted | found | verdict |"
    assert len(lines) == 4 + len(rows)
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.json", "tiny.md"}
