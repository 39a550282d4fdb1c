"""Test runs that go on, and a real model's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from served import documented_nll, serve_command
from small_run import ROOT, run_to_end

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.documents.spec.documents import SEED_KINDS
from cartridge_forge.plugins.documents.study.material import read_material
from cartridge_forge.plugins.spec_files.loading import load_resolved
from cartridge_forge.protocols.files import read_rows

pytestmark = [pytest.mark.timeout(3600)]

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


FORGE = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"
PAGE = ROOT / "docs" / "explanation" / "rsa.md"
REAL_SETS = (
    "model.dtype=float32",  # bfloat16 rounds by up to 0.2 nats an answer where the batch is another
    "evaluate.arms=[none,document,on_policy]", "evaluate.questions=20", "evaluate.max_tokens=8",
    "evaluate.contamination=warn", "data.questions=questions.json",
    "self_study.questions=8", "rollout.prompts=4", "rollout.max_tokens=32", "train.steps=4",
    "train.warmup_steps=0", "train.checkpoint_every=2",
)  # fmt: skip


def test_a_real_model_reads_a_page_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document helps; the cartridge is a tenth of it, trained and in the library. A server
    that has it gives the run's loss of every right answer."""
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
    sets = [word for one in REAL_SETS for word in ("--set", one)]
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
    asked_of_page = "What is recursive self-aggregation?"  # to others it may say nothing
    assert forge("ask", "pages", asked_of_page, "--max-tokens", "8", *serving).strip()

    # The same answers over HTTP.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORGE_HOME", str(tmp_path / "home"))
    learn = load_resolved(tmp_path / "runs/documents/latest/spec.yaml").learn
    _, asked = read_material(learn, load_tokenizer(learn.model.path))
    kept = {(row["arm"], row["id"]): row["nll"] for row in rows}
    of_model = ("name=smollm2", "model.path=smollm2-135m", f"model.dtype={learn.model.dtype}")
    gaps = []
    with (
        serve_command(tmp_path, *of_model, "roles.generator.replicas=1") as (_, url, _),
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        gold_nll = documented_nll(client, Path(learn.model.path))
        for question in asked:
            assert question.wording is not None
            for arm, name in (("none", "smollm2"), ("on_policy", "smollm2+pages")):
                told = gold_nll(name, question.text, question.wording)
                gaps.append(abs(told - kept[arm, question.id]))
    assert len(gaps) == 2 * 20
    assert max(gaps) < 1e-3
