"""Runs on a user's rows and rewards. (In tests/nightly/runs/resumed a function fails in every
way.)"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from example_runs import by_clerk, copied
from small_run import ROOT, run_to_end

from cartridge_forge.protocols.files import read_rows

pytestmark = [pytest.mark.timeout(900)]  # a busy machine starts it slowly

BROKEN = """\
class Broken:
    def reset(self, seed):
        return "say something."

    def step(self, text):
        raise ValueError("too late")
"""


def written(module: str, out: Path) -> None:
    """Run an example's own script."""
    subprocess.run(
        [sys.executable, "-m", f"examples.{module}", "--out", str(out)],
        check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
    )  # fmt: skip


def test_the_parquet_example_records_both_rewards(tmp_path: Path) -> None:
    mesh = copied("parquet_two_rewards", tmp_path / "example")
    written("parquet_two_rewards.problems", mesh.parent / "problems.parquet")
    process = run_to_end(by_clerk(mesh, tmp_path))
    assert process.returncode == 0, process.stdout + process.stderr
    run = (tmp_path / "parquet_two_rewards" / "latest").resolve()
    for episode in read_rows(run / "episodes.jsonl"):
        given = {name: outcome["value"] for name, outcome in episode["rewards"].items()}
        words = len(episode["turns"][0]["text"].split())
        assert given["brief"] == (1.0 if words <= 4 else 4 / words)
        assert episode["reward"] == pytest.approx(given["correct"] + 0.5 * given["brief"])
    (metrics,) = read_rows(run / "metrics.jsonl")
    assert {"reward", "reward/correct", "reward/brief"} <= metrics["episodes"].keys()
    arm = json.loads((run / "results.json").read_text())["arms"]["on_policy"]
    low, high = arm["reward_ci95"]
    assert low <= arm["reward"] <= high


def test_a_run_whose_episodes_all_fail_says_so_once(tmp_path: Path) -> None:
    mesh = copied("code_fixing", tmp_path / "example")
    (mesh.parent / "mine.py").write_text(BROKEN)
    broken = {"kind": "python", "factory": "mine:Broken", "folder": str(mesh.parent)}
    sets = {"episodes.environment": broken, "train.steps": 2}
    process = run_to_end(by_clerk(mesh, tmp_path, **sets))
    assert process.returncode == 0, process.stdout + process.stderr
    told = (
        "step 1: none of 8 episodes has a reward; 8 of them: environment_refused: "
        "ValueError: too late (mine.py:6); forge env check MESH plays a few"
    )
    run = (tmp_path / "code_fixing" / "latest").resolve()
    warned = [e["message"] for e in read_rows(run / "events.jsonl") if e["event"] == "warned"]
    assert [w for w in warned if w.startswith("step")] == [told]
    assert process.stdout.count(f"warning: {told}") == 1
