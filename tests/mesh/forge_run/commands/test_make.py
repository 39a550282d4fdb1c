"""`forge make` from a folder to an answer: plan, run, library, `forge ask` with --beside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import ROOT

pytestmark = [pytest.mark.timeout(900)]

READER = ROOT / "models" / "clinic-reader"
SMALL = (
    "self_study.questions=6", "self_study.min_chunk=100", "self_study.max_chunk=300",
    "self_study.question_tokens=40", "rollout.prompts=6", "rollout.max_tokens=12",
    "train.steps=2", "train.warmup_steps=0", "train.checkpoint_every=1", "train.row_tokens=256",
    "evaluate.questions=2", "evaluate.max_tokens=8", "spares=0",
)  # fmt: skip


def test_a_folder_becomes_a_cartridge_that_answers(tmp_path: Path) -> None:
    texts = tmp_path / "tales"
    texts.mkdir()
    article = (ROOT / "tests" / "data" / "articles" / "salt.txt").read_text()
    (texts / "salt.txt").write_text(article)
    serve = (ROOT / "meshes" / "serve.yaml").read_text()
    serve = serve.replace("../library", str(tmp_path / "library"))
    (tmp_path / "serve.yaml").write_text(serve.replace("../models", str(ROOT / "models")))

    def forge(*words: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; from forge_run.cli import forge; sys.exit(forge())"
        return subprocess.run(
            [sys.executable, "-c", code, *words, "--serve", str(tmp_path / "serve.yaml")],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
            text=True, timeout=600,
        )  # fmt: skip

    sets = [word for one in SMALL for word in ("--set", one)]
    made = forge("make", str(texts), "--model", str(READER), "--tokens", "24", *sets)
    assert made.returncode == 0, made.stderr
    assert "one cartridge of 24 tokens" in made.stderr
    assert "a usable cartridge exists: forge ask DOCUMENT QUESTION --run" in made.stderr
    assert "tales@1: 24 tokens" in made.stdout
    asked = forge("ask", "tales", "what is salt?", "--max-tokens", "6", "--beside", "--json")
    assert asked.returncode == 0, asked.stderr
    arms = {one["arm"]: one for one in json.loads(asked.stdout)}
    assert list(arms) == ["none", "cartridge", "document"]
    assert [arms[a]["prefix_tokens"] for a in ("none", "cartridge")] == [0, 24]
    assert arms["document"]["prefix_tokens"] > 100
    alone = forge("ask", "tales", "what is salt?", "--max-tokens", "6")
    assert alone.stdout.strip() == arms["cartridge"]["answer"]
    (texts / "salt.txt").write_text(article + " And more.")
    changed = forge("ask", "tales", "what is salt?", "--beside")
    assert (changed.returncode, "have changed since" in changed.stderr) == (2, True)
