"""A run that continues another begins where that one ended, and ten more steps keep what it knew.

The tiny reader with three articles. Agreement is the KL from the teacher on held-out questions,
which are the same in both runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from small_run import ROOT, run_to_end

from cartridge_forge.plugins.documents.spec.documents import SEED_KINDS
from cartridge_forge.protocols.files import read_rows

pytestmark = [pytest.mark.timeout(1800)]  # a busy machine starts it slowly

SETS: dict[str, Any] = {
    "data.path": str(ROOT / "tests" / "data" / "articles"),
    "self_study.questions": 12,
    "self_study.mix": dict.fromkeys(SEED_KINDS, 1),
    "self_study.min_chunk": 100,
    "self_study.max_chunk": 300,
    "self_study.question_tokens": 40,
    "rollout.prompts": 21,
    "rollout.max_tokens": 16,
    "train.steps": 12,
    "train.lr": 0.3,  # the tiny model's keys and values are large
    "train.lr_scale": "absolute",
    "cartridge.init": "first_tokens",  # far from the document: what a start is measured against
    "train.warm_start": None,
    "train.warmup_steps": 1,
    "train.row_tokens": 256,
    "evaluate.arms": ["untrained", "on_policy"],
    "evaluate.questions": 24,
    "evaluate.max_tokens": 12,
    "roles.generator.replicas": 1,
    "roles.doc_teacher.threads": 1,
    "roles.trainer.threads": 1,
    "spares": 0,
}


def run(root: Path, *extra: str, **sets: Any) -> Path:
    code = "import sys; from cartridge_forge.forge_run.cli import forge_run; sys.exit(forge_run())"
    words = [sys.executable, "-c", code, str(ROOT / "meshes/documents.yaml")]
    words += ["--run-dir", str(root), *extra]
    for key, value in {**SETS, **{k.replace("__", "."): v for k, v in sets.items()}}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    process = run_to_end(words, timeout=800)
    assert process.returncode == 0, process.stdout + process.stderr
    return (root / "documents" / "latest").resolve()


def kl(path: Path, arm: str) -> float:
    found: float = json.loads((path / "results.json").read_text())["arms"][arm]["agreement"]["kl"]
    return found


def test_the_first_kl_is_the_last_of_the_run_before_and_more_steps_keep_it(tmp_path: Path) -> None:
    first = run(tmp_path, train__warm_start={"steps": 9})
    assert abs(kl(first, "on_policy") - kl(first, "untrained")) > 0.2  # training moved it
    second = run(tmp_path, "--continue", "latest", train__steps=10, train__lr=0.03)
    assert second != first
    assert kl(second, "untrained") == pytest.approx(kl(first, "on_policy"), rel=1e-3)
    assert kl(second, "on_policy") <= 1.1 * kl(second, "untrained")
    rows = {path: read_rows(path / "metrics.jsonl") for path in (first, second)}
    assert len(rows[second]) == 10
    assert rows[second][0]["kl"] < 0.5 * rows[first][0]["kl"]
