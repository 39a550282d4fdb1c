"""The examples on rows and rewards, whole: what they train is beyond chance."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_run import ROOT, run_to_end

pytestmark = [pytest.mark.timeout(3600)]

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both examples with what their scripts make."""
    folder = tmp_path_factory.mktemp("examples")
    made = shutil.ignore_patterns("model", "problems.jsonl", "problems.parquet", "__pycache__")
    for name in ("gsm8k_like", "parquet_two_rewards"):
        shutil.copytree(EXAMPLES / name, folder / name, ignore=made)
    for module, out in (
        ("gsm8k_like.problems", "gsm8k_like/problems.jsonl"),
        ("gsm8k_like.make_model", "gsm8k_like/model"),
        ("parquet_two_rewards.problems", "parquet_two_rewards/problems.parquet"),
    ):
        subprocess.run(
            [sys.executable, "-m", f"examples.{module}", "--out", str(folder / out)],
            check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    return folder


def results(examples: Path, name: str, run_dir: Path) -> dict[str, Any]:
    code = "import sys; from forge_run.cli import forge_run; sys.exit(forge_run())"
    mesh = str(examples / name / "mesh.yaml")
    process = run_to_end([sys.executable, "-c", code, mesh, "--run-dir", str(run_dir)], 3000)
    assert process.returncode == 0, process.stdout + process.stderr
    found: dict[str, Any] = json.loads((run_dir / name / "latest" / "results.json").read_text())
    return found


@pytest.mark.parametrize("name", ["gsm8k_like", "parquet_two_rewards"])
def test_the_reward_rises_beyond_the_interval(name: str, examples: Path, tmp_path: Path) -> None:
    arms = results(examples, name, tmp_path)["arms"]
    before, after = arms["untrained"]["sampled"], arms["on_policy"]["sampled"]
    assert after["ci95"][0] > before["ci95"][1]  # right answers, by the first reward
    assert after["reward_ci95"][0] > before["reward_ci95"][1]
