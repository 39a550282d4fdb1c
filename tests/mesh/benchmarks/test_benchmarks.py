"""Test that benchmarks run: counted steps, the check on a GPU, the whole run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.correctness import SPREADS
from benchmarks.gpu.phase_step import SETTINGS, bounds
from benchmarks.gpu.rows import FAILED, NOT_RUN
from benchmarks.step_gpu import dry
from cartridge_forge.forge_run.plan.roofline import EXPLICIT


def test_the_seed_s_size_in_shape_alone() -> None:
    """The analysis takes the last layer at every token, the code where a token is predicted."""
    setting = SETTINGS["3b"]
    counted, analysis = dry(setting), bounds(setting, EXPLICIT)
    for phase in ("teacher", "student"):
        assert counted[phase]["flops"] == pytest.approx(analysis[phase].flops, rel=1 / 28)


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
