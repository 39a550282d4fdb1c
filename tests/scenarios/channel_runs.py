"""Runs of meshes/three_channels.yaml from the command line, cut down to a few steps."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from small_run import ROOT, Finished, run_to_end

from cartridge_forge.protocols.files import read_rows

STEPS, TASKS, GROUP = 4, 2, 3
SMALL: dict[str, Any] = {
    "train.steps": STEPS,
    "train.warmup_steps": 1,
    "train.checkpoint_every": 1,
    "episodes.tasks": TASKS,
    "episodes.group": GROUP,
    "objective.alpha_warmup_steps": 0,
    "objective.compare_every": 1,
    "evaluate.questions": 6,
    "evaluate.probe_every": 2,
    "evaluate.probe_questions": 4,
    "evaluate.sampled": False,
    "roles.generator.replicas": 1,
    "roles.teacher_replay.replicas": 1,
    "roles.trainer.threads": 1,
    "health.heartbeat_s": 0.3,
}
WITHOUT_TEACHERS = {"replay": None, "objective.beta": 0.0}


def command(root: Path, *extra: str, **sets: Any) -> list[str]:
    code = "import sys; from cartridge_forge.forge_run.cli import forge_run; sys.exit(forge_run())"
    mesh = str(ROOT / "meshes" / "three_channels.yaml")
    words = [sys.executable, "-c", code, mesh, "--run-dir", str(root), *extra]
    for key, value in {**SMALL, **sets}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return words


def directory(root: Path) -> Path:
    return (root / "three_channels" / "latest").resolve()


def whole_run(root: Path, **sets: Any) -> Finished:
    process = run_to_end(command(root, **sets))
    told = process.stdout + process.stderr
    assert process.returncode == 0, f"exit code {process.returncode}\n{told}"
    return Finished(process, directory(root))


def wait_for(root: Path, step: int, timeout: float = 180.0) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        metrics = directory(root) / "metrics.jsonl"
        if metrics.exists() and any(row["step"] >= step for row in read_rows(metrics)):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} did not come within {timeout} s")


def pids(root: Path) -> dict[str, list[int]]:
    events = read_rows(directory(root) / "events.jsonl")
    return {e["role"]: e["pids"] for e in events if e["event"] == "role_ready"}
