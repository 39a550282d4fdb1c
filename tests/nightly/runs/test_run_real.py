"""The five-minute tier of `make run-real`: the real model, one of the pages, its questions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import ROOT

pytestmark = [pytest.mark.timeout(3600)]

FORGE = "import sys; from forge_run.cli import forge; sys.exit(forge())"
PAGE = ROOT / "docs" / "explanation" / "rsa.md"
SETS = (
    "evaluate.arms=[none,document,on_policy]", "evaluate.questions=20", "evaluate.max_tokens=8",
    "evaluate.contamination=warn", "data.questions=questions.json",
    "self_study.questions=8", "rollout.prompts=4", "rollout.max_tokens=32", "train.steps=4",
    "train.warmup_steps=0", "train.checkpoint_every=2",
)  # fmt: skip


def test_a_real_model_reads_a_page_of_ours(tmp_path: Path) -> None:
    """The document helps; the cartridge is a tenth of it, trained and in the library."""
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "rsa.md").write_text(PAGE.read_text())
    questions = json.loads((ROOT / "configs" / "our_docs.json").read_text())
    questions["data"] = [one for one in questions["data"] if one["title"] == "rsa"]
    (tmp_path / "questions.json").write_text(json.dumps(questions))
    serve = (ROOT / "meshes" / "serve.yaml").read_text()
    serve = serve.replace("../library", str(tmp_path / "library"))
    (tmp_path / "serve.yaml").write_text(serve.replace("../models", str(ROOT / "models")))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FORGE_HOME": str(tmp_path / "home")}

    def forge(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", FORGE, *words], cwd=tmp_path, env=environment,
            capture_output=True, text=True, timeout=3000,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    serving = ("--serve", str(tmp_path / "serve.yaml"))
    forge("models", "add", "smollm2-135m")
    sets = [word for one in SETS for word in ("--set", one)]
    made = forge("make", "pages", "--minutes", "600", *serving, *sets)
    assert "pages@1: " in made
    results = json.loads((tmp_path / "runs" / "documents" / "latest" / "results.json").read_text())
    assert results["status"] == "finished"
    rows = [
        json.loads(line)
        for line in (tmp_path / "runs/documents/latest/answers.jsonl").read_text().splitlines()
    ]
    nll: dict[str, list[float]] = {}
    for row in rows:
        if row.get("nll") is not None:
            nll.setdefault(row["arm"], []).append(row["nll"])
    means = {arm: sum(of) / len(of) for arm, of in nll.items()}
    assert means["document"] < means["none"]
    assert forge("ask", "pages", "Who published it?", "--max-tokens", "8", *serving).strip()
