"""The examples on rows and rewards, whole: what they train is beyond chance."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from small_run import ROOT, run_to_end, running

from cartridge_forge.protocols.files import read_rows

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


def command(examples: Path, name: str, run_dir: Path, *sets: str) -> list[str]:
    code = "import sys; from cartridge_forge.forge_run.cli import forge_run; sys.exit(forge_run())"
    words = [sys.executable, "-c", code, str(examples / name / "mesh.yaml")]
    return [*words, "--run-dir", str(run_dir), *(w for s in sets for w in ("--set", s))]


def results(examples: Path, name: str, run_dir: Path) -> dict[str, Any]:
    process = run_to_end(command(examples, name, run_dir), 3000)
    assert process.returncode == 0, process.stdout + process.stderr
    found: dict[str, Any] = json.loads((run_dir / name / "latest" / "results.json").read_text())
    return found


@pytest.mark.parametrize("name", ["gsm8k_like", "parquet_two_rewards"])
def test_the_reward_rises_beyond_the_interval(name: str, examples: Path, tmp_path: Path) -> None:
    arms = results(examples, name, tmp_path)["arms"]
    before, after = arms["untrained"]["sampled"], arms["on_policy"]["sampled"]
    assert after["ci95"][0] > before["ci95"][1]  # right answers, by the first reward
    assert after["reward_ci95"][0] > before["reward_ci95"][1]


def first_event(events: Path, seconds: float = 300.0, **what: Any) -> dict[str, Any]:
    """The first event with these fields, once there is one."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for row in read_rows(events) if events.exists() else ():
            if what.items() <= row.items():
                return row
        time.sleep(0.02)
    raise AssertionError(f"no event {what} within {seconds} s")


def test_a_killed_reward_replica_is_replaced_and_changes_no_number(
    examples: Path, tmp_path: Path
) -> None:
    name = "parquet_two_rewards"
    short = ("train.steps=6", "train.warmup_steps=0", "episodes.tasks=4", "evaluate.questions=8")
    calm = run_to_end(command(examples, name, tmp_path / "calm", *short))
    assert calm.returncode == 0, calm.stdout + calm.stderr
    root = tmp_path / "struck"
    with running(command(examples, name, root, *short), root) as run:
        event = first_event(root / name / "latest" / "events.jsonl", event="step", step=1)
        assert event["arm"] == "on_policy"
        ready = first_event(
            root / name / "latest" / "events.jsonl", event="role_ready", role="reward"
        )
        os.kill(ready["pids"][0], signal.SIGKILL)
        said, _ = run.process.communicate(timeout=500)
        assert run.process.returncode == 0, said
    paths = [(tmp_path / who / name / "latest").resolve() for who in ("calm", "struck")]
    lost = [e["role"] for e in read_rows(paths[1] / "events.jsonl") if e["event"] == "replica_lost"]
    assert lost == ["reward"]
    for file in ("metrics.jsonl", "episodes.jsonl"):
        assert (paths[0] / file).read_bytes() == (paths[1] / file).read_bytes()
