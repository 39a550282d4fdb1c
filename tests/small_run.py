"""A small run: the shipped mesh and config, cut down by overrides to a handful of steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MESH = ROOT / "meshes" / "longhealth.yaml"

SMALL = {
    "data.patients": 2,
    "rollout.prompts": 6,
    "rollout.max_tokens": 24,
    "train.steps": 6,
    "train.warmup_steps": 2,
    "train.checkpoint_every": 2,
    "evaluate.questions": 8,
    "evaluate.probe_every": 3,
    "evaluate.probe_questions": 4,
    "evaluate.max_tokens": 20,
    "roles.doc_teacher.threads": 1,
    "roles.trainer.threads": 1,
}


def command(run_dir: Path, *extra: str, **sets: Any) -> list[str]:
    """The console script's own function, with the small overrides and some more."""
    code = "import sys; from forge_run.cli import forge_run; sys.exit(forge_run())"
    words = [sys.executable, "-c", code, str(MESH), "--run-dir", str(run_dir), *extra]
    for key, value in {**SMALL, **{k.replace("__", "."): v for k, v in sets.items()}}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return words


def run_to_end(words: list[str], timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=timeout
    )


def latest(run_dir: Path) -> Path:
    return (run_dir / "longhealth" / "latest").resolve()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
