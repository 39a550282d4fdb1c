"""A finished run's cartridges, served: the loss of each right answer over HTTP is the run's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from openai import OpenAI
from served import documented_nll, serve_command
from small_run import MESH, Finished, rows

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.clinic.text import right_answer
from cartridge_forge.plugins.documents.study.longhealth import LongHealthPrompts, read_patients
from cartridge_forge.protocols.spec.loading import load_resolved

ROOT = MESH.parents[1]
CODE = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"


def test_the_loss_of_every_right_answer_is_the_run_s(finished: Finished, tmp_path: Path) -> None:
    words = ["cartridges", "add", str(finished.path), "--set", f"library={tmp_path / 'library'}"]
    subprocess.run(
        [sys.executable, "-c", CODE, *words], check=True, env=dict(os.environ), cwd=tmp_path,
        capture_output=True,
    )  # fmt: skip
    learn = load_resolved(finished.path / "spec.yaml").learn
    tasks = LongHealthPrompts(learn, read_patients(learn.data), load_tokenizer(learn.model.path))
    kept = {
        (row["arm"], row["id"]): row
        for row in rows(finished.path / "answers.jsonl")
        if not row["sampled"] and row["nll"] is not None
    }
    newest = max(row["step"] for (arm, _), row in kept.items() if arm == "on_policy")
    with (
        serve_command(tmp_path, "roles.generator.replicas=1", "spares=0") as (_, url, _),
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        gold_nll = documented_nll(client)
        losses = {}
        for exam in tasks.exams:
            gold = right_answer(exam.question, exam.text)
            for arm in ("on_policy", "none"):
                row = kept[arm, exam.question.id]
                name = (
                    f"clinic-reader+{row['cartridge']}" if arm == "on_policy" else "clinic-reader"
                )
                losses[arm, exam.question.id] = gold_nll(name, exam.text, gold)
    assert len(losses) == 2 * len(tasks.exams) > 0
    assert {kept[key]["step"] for key in losses if key[0] == "on_policy"} == {newest}
    for key, loss in losses.items():
        assert loss == pytest.approx(kept[key]["nll"], abs=1e-4), key
    trained, bare = (
        [loss for (arm, _), loss in losses.items() if arm == name] for name in ("on_policy", "none")
    )
    assert max(abs(a - b) for a, b in zip(trained, bare, strict=True)) > 0.01
