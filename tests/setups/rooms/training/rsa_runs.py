"""Runs of meshes/rsagent.yaml from the command line, cut down, and one that is finished."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_run import ROOT, run_to_end

from cartridge_forge.plugins.documents.study.longhealth import LongHealthPrompts, read_patients
from cartridge_forge.protocols.spec.learn import LearnSpec

SMALL: dict[str, Any] = {
    "data.patients": 2,
    "train.steps": 4,
    "train.warmup_steps": 1,
    "train.checkpoint_every": 1,
    "rsa.M": 2,
    "rsa.N": 2,
    "rsa.K": 2,
    "rsa.T": 4,
    "rsa.examples": 2,
    "rsa.rollouts_per_example": 2,
    "rsa.advantage": "rollout",
    "evaluate.arms": ["untrained", "on_policy"],
    "evaluate.questions": 6,
    "evaluate.probe_every": 2,
    "evaluate.probe_questions": 3,
    "roles.generator.replicas": 1,
    "roles.trainer.threads": 1,
    "health.heartbeat_s": 0.3,
}
CANDIDATES = 4 * 4  # T populations of M * N


def command(root: Path, *extra: str) -> list[str]:
    code = "import sys; from cartridge_forge.forge_run.cli import forge_run; sys.exit(forge_run())"
    mesh = str(ROOT / "meshes" / "rsagent.yaml")
    words = [sys.executable, "-c", code, mesh, "--run-dir", str(root), *extra]
    for key, value in SMALL.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return words


def directory(root: Path) -> Path:
    return (root / "rsagent" / "latest").resolve()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("calm")
    process = run_to_end(command(root))
    assert process.returncode == 0, process.stdout + process.stderr
    return directory(root)


ALL_KINDS = ("recite", "structure", "summarise", "question")


def learn(
    *,
    patients: int = 3,
    held_out: float = 0.5,
    prompts: int = 4,
    seed: int = 0,
    questions: int = 200,
    instruction: str = "",
    kinds: Sequence[str] = ALL_KINDS,
) -> LearnSpec:
    """Return the spec of a small run over a model that is at no place."""
    return LearnSpec.read(
        {
            "model": {"path": "tiny"},
            "data": {
                "patients": patients, "facts": 12, "notes": 2, "held_out": held_out,
                "instruction": instruction,
            },
            "cartridge": {"tokens": 8},
            "rollout": {
                "prompts": prompts, "max_tokens": 24, "temperature": 0.7, "top_p": 0.9,
                "top_k": 40, "kinds": tuple(kinds),
            },
            "train": {"steps": 4, "row_tokens": 128, "seed": seed},
            "evaluate": {"questions": questions, "max_tokens": 16, "temperature": 0.5},
        }
    )  # fmt: skip


def tasks(tokenizer: Any, spec: LearnSpec) -> LongHealthPrompts:
    """Return the prompts of a config over its own patients."""
    return LongHealthPrompts(spec, read_patients(spec.data), tokenizer)
