"""A run of one cartridge for a corpus in chunks, from the command line to an answer of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import command, latest, rows, run_to_end

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.documents.study.longhealth import LongHealthPrompts, read_patients
from cartridge_forge.plugins.library.formats import convert, run_checkpoint
from cartridge_forge.protocols.files import read_rows
from cartridge_forge.protocols.spec.loading import load_resolved

pytestmark = [pytest.mark.timeout(900)]  # a busy machine starts it slowly

CORPUS: dict[str, Any] = {
    "cartridge.per": "corpus",
    "cartridge.tokens": 24,
    "teacher.context_tokens": 80,  # a chart has some 231
    "train.steps": 4,
    "evaluate.arms": ["untrained", "on_policy"],
    "evaluate.sampled": False,
    "evaluate.probe_every": 0,
}


@pytest.mark.parametrize("context", ["own", "retrieved"])
def test_a_corpus_is_trained_exported_and_asked(
    context: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = run_to_end(command(tmp_path, **CORPUS, teacher__context=context))
    assert process.returncode == 0, process.stdout + process.stderr
    run = latest(tmp_path)
    learn = load_resolved(run / "spec.yaml").learn
    tokenizer = load_tokenizer(learn.model.path)
    prompts = LongHealthPrompts(
        learn, read_patients(learn.data), tokenizer, learn.teacher.context_tokens
    )
    owners = prompts.layout.documents
    assert len(owners) > 2 * len(prompts.patients)

    # Every prompt names its patient, and the teacher reads of that patient's chunks, or the found.
    sampled = [row for row in rows(run / "rollouts.jsonl") if row["arm"] == "on_policy"]
    assert len(sampled) == 4 * 6
    for row in sampled:
        assert row["cartridge"] == "corpus"
        asked = tokenizer.decode(row["prompt_ids"], skip_special_tokens=True)
        assert asked.strip().startswith(f"{prompts.patients[row['document']].name}: ")
        whose = {owners[name] for name in row["contexts"]}
        assert whose == {row["document"]} if context == "own" else whose <= set(prompts.patients)
    if context == "retrieved":
        assert {len(row["contexts"]) for row in sampled} == {learn.teacher.retrieved}

    # It is trained but for its first token, and exported to the bit.
    old, new = (
        run_checkpoint.read(run / "checkpoints" / f"version-00000{v}", "corpus") for v in (2, 4)
    )
    moved = (new.kv - old.kv).abs().amax(dim=(0, 1, 2, 4))
    assert len(moved) == 24
    assert moved[0] == 0 < moved[1:].min()
    convert.convert(new, tmp_path / "out", "forge")
    assert torch.equal(convert.read(tmp_path / "out").kv, new.kv)

    # Asked by the command, it answers as in its evaluation.
    exam = prompts.exams[0]
    (said,) = [
        row for row in read_rows(run / "answers.jsonl")
        if row["arm"] == "on_policy" and row["id"] == exam.question.id
        and row["document"] == exam.question.patient
    ]  # fmt: skip
    assert said["cartridge"] == "corpus"
    words = ("--run", str(run), "--max-tokens", str(learn.evaluate.max_tokens))
    assert forge(["ask", "corpus", exam.text, *words]) == 0
    assert capsys.readouterr().out.strip() == said["text"]
