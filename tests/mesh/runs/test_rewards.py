"""Runs on a user's rows and rewards: the examples, a function that fails in every way, resuming."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_run import ROOT, rows, run_to_end

from protocols.files import read_rows

pytestmark = [pytest.mark.timeout(900)]  # a busy machine starts it slowly

EXAMPLES = ROOT / "examples"
MODEL = ROOT / "models" / "clinic-clerk"
SHORT: dict[str, Any] = {
    "model.path": str(MODEL), "train.steps": 1, "train.warmup_steps": 0,
    "episodes.tasks": 2, "episodes.group": 4,
    "evaluate.arms": ["on_policy"], "evaluate.questions": 4, "evaluate.sampled": False,
}  # fmt: skip
FAULTY = """\
import os, sys, time

def faulty(prompt, completion, number):
    print("to nobody")
    if number == 0:
        raise KeyError("gone")
    if number == 1:
        time.sleep(60)
    if number == 2:
        sys.exit(5)
    if number == 3:
        os._exit(9)
    if number == 4:
        return None
    return len(completion)
"""
BROKEN = """\
class Broken:
    def reset(self, seed):
        return "say something."

    def step(self, text):
        raise ValueError("too late")
"""


def forge_run(mesh: Path, run_dir: Path, *extra: str, **sets: Any) -> list[str]:
    code = "import sys; from forge_run.cli import forge_run; sys.exit(forge_run())"
    words = [sys.executable, "-c", code, str(mesh), "--run-dir", str(run_dir), *extra]
    for key, value in {**SHORT, **sets}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return words


def written(module: str, out: Path) -> None:
    """Run an example's own script."""
    subprocess.run(
        [sys.executable, "-m", f"examples.{module}", "--out", str(out)],
        check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
    )  # fmt: skip


def copied(name: str, folder: Path) -> Path:
    """A copy of an example without what its script makes."""
    shutil.copytree(
        EXAMPLES / name,
        folder,
        ignore=shutil.ignore_patterns("model", "problems.[jp]*", "__pycache__"),
    )
    return folder / "mesh.yaml"


def test_the_parquet_example_records_both_rewards(tmp_path: Path) -> None:
    mesh = copied("parquet_two_rewards", tmp_path / "example")
    written("parquet_two_rewards.problems", mesh.parent / "problems.parquet")
    process = run_to_end(forge_run(mesh, tmp_path))
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


def test_a_faulty_function_costs_its_episodes_alone_and_rows_may_not_change(
    tmp_path: Path,
) -> None:
    mesh = copied("gsm8k_like", tmp_path / "example")
    (mesh.parent / "mine.py").write_text(FAULTY)
    problems = mesh.parent / "problems.jsonl"
    page = "a page that is longer than the cartridge, for it has some more words than this " * 2
    problems.write_text(
        "".join(
            json.dumps({"question": f"problem {i}", "target": "1", "page": page, "number": i % 8})
            + "\n"
            for i in range(16)
        )
    )
    sets = {
        "reward": [{"python": "mine:faulty", "timeout_s": 1.0, "folder": str(mesh.parent)}],
        "episodes.tasks": 12,
        "episodes.group": 2, "train.steps": 2, "train.checkpoint_every": 1,
    }  # fmt: skip
    process = run_to_end(forge_run(mesh, tmp_path, **sets))
    assert process.returncode == 0, process.stdout + process.stderr
    run = (tmp_path / "gsm8k_like" / "latest").resolve()
    whys = {
        0: "mine.py:6: KeyError: 'gone'", 1: "mine.py:8: took longer than 1 s",
        2: "mine.py:10: called sys.exit(5)", 3: "its process ended with 9", 4: "gave None",
    }  # fmt: skip
    met = set()
    for episode in read_rows(run / "episodes.jsonl"):
        number, outcome = (
            episode["task"]["arguments"]["row"]["number"],
            episode["rewards"]["faulty"],
        )
        met.add(number)
        assert outcome["why"] == whys.get(number, "")
        assert outcome["failed"] == (number in (0, 1, 2, 3))
        kind = "reward_left_out" if number == 4 else "reward_failed"
        assert episode["error_kind"] == (kind if number in whys else "")
        assert (episode["reward"] is None) == (number in whys)
    assert met == set(range(8))
    for row in rows(run / "metrics.jsonl"):
        counts = row["episodes"]
        failed = counts["reward/faulty/failed"] + counts["reward/faulty/left_out"]
        assert counts["errored"] == failed > 0

    # The same rows resume; others do not.
    problems.write_text(problems.read_text().replace("problem 7", "problem seven"))
    again = run_to_end(forge_run(mesh, tmp_path, "--resume", **sets))
    assert again.returncode == 2
    assert "changed since the run began" in again.stdout + again.stderr


def test_a_run_whose_episodes_all_fail_says_so_once(tmp_path: Path) -> None:
    mesh = copied("code_fixing", tmp_path / "example")
    (mesh.parent / "mine.py").write_text(BROKEN)
    broken = {"kind": "python", "factory": "mine:Broken", "folder": str(mesh.parent)}
    sets = {"episodes.environment": broken, "train.steps": 2}
    process = run_to_end(forge_run(mesh, tmp_path, **sets))
    assert process.returncode == 0, process.stdout + process.stderr
    told = (
        "step 1: none of 8 episodes has a reward; 8 of them: environment_refused: "
        "ValueError: too late (mine.py:6); forge env check MESH plays a few"
    )
    run = (tmp_path / "code_fixing" / "latest").resolve()
    warned = [e["message"] for e in read_rows(run / "events.jsonl") if e["event"] == "warned"]
    assert [w for w in warned if w.startswith("step")] == [told]
    assert process.stdout.count(f"warning: {told}") == 1
