"""Test whole runs over documents, over a corpus, and from a start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import ROOT, command, latest, rows, run_to_end

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.documents.study.longhealth import LongHealthPrompts, read_patients
from cartridge_forge.plugins.library.formats import convert, run_checkpoint
from cartridge_forge.plugins.library.formats.base_model import read_base
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile, Provenance
from cartridge_forge.plugins.library.starts.trained import lineage
from cartridge_forge.plugins.library.terms import read_terms
from cartridge_forge.plugins.spec_files.loading import load_resolved
from cartridge_forge.protocols.files import read_rows

pytestmark = [pytest.mark.timeout(900)]  # a busy machine starts it slowly


def test_a_folder_is_trained_on_measured_and_reported(over_documents: Path) -> None:
    read = json.loads((over_documents / "documents.json").read_text())
    names = [d["name"] for d in read["documents"]]
    assert names == [
        "book.part_01", "book.part_02", "coast.lighthouse", "kestrel", "old", "printed", "salt",
    ]  # fmt: skip
    # Of torn.jsonl one row is no JSON, and the other too short for a cartridge.
    left_out = {x.split()[0] for x in read["left_out"]}
    assert left_out == {"empty.txt", "program.txt", "torn.jsonl#1", "torn.jsonl#2"}
    results = json.loads((over_documents / "results.json").read_text())
    assert results["status"] == "finished"
    agreement = {name: arm["agreement"] for name, arm in results["arms"].items()}
    assert agreement["document"]["kl"] == pytest.approx(0.0, abs=1e-5)
    assert agreement["document"]["top1"] == 1.0
    assert agreement["on_policy"]["kl"] < agreement["untrained"]["kl"]
    # Four of the seven tell one story, so words alone do not tell them apart.
    routing = results["arms"]["on_policy"]["routing"]
    assert (routing["n"], sorted(read_terms(over_documents / "terms.json"))) == (12, names)
    assert 0 < routing["accuracy"] < 1
    answers = read_rows(over_documents / "answers.jsonl")
    routed = [a for a in answers if a["arm"] == "routed"]
    own = {a["id"]: a["nll"] for a in answers if a["arm"] == "on_policy"}
    same = sum(own[a["id"]] == a["nll"] for a in routed)
    assert same == pytest.approx(routing["accuracy"] * routing["n"])
    rows = read_rows(over_documents / "metrics.jsonl")
    assert rows[-1]["kl"] < rows[0]["kl"]
    assert {row["stale_tokens"] for row in rows} == {0}
    rollouts = read_rows(over_documents / "rollouts.jsonl")
    for row in rollouts:  # the teacher's text for three steps, then the cartridge's own
        assert set(row["versions"]) == ({-1} if row["step"] <= 3 else {row["step"] - 1})
    assert results["warm_steps"] == 3
    events = read_rows(over_documents / "events.jsonl")
    assert [e["step"] for e in events if e["event"] == "switched"] == [4]
    study = read_rows(over_documents / "selfstudy.jsonl")
    assert len(study) == 6 * len(names)
    report = (over_documents / "report.html").read_text()
    assert "<h2>Documents</h2>" in report
    assert "program.txt is binary" in report


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


READER = ROOT / "models/clinic-reader"
SHORT: dict[str, Any] = {
    "train.steps": 3,
    "train.warmup_steps": 1,
    "train.checkpoint_every": 0,
    "evaluate.arms": ["untrained", "on_policy"],
    "evaluate.sampled": False,
    "evaluate.probe_every": 0,
    "cartridge.frozen": None,
}


def bits(kv: torch.Tensor) -> torch.Tensor:
    return kv.contiguous().view(torch.int32)


def cartridge() -> torch.Tensor:
    """Keys and values of 28 words, [L, 2, H_kv, 28, D]."""
    return document_kv(load_model(str(READER)), (1, *range(40, 67))).float()


def test_frozen_tokens_of_a_pt_go_out_as_they_came_in_and_a_run_is_continued(
    tmp_path: Path,
) -> None:
    """8 of 28 tokens are frozen. patient_02 has no file. The run is then continued with a patient
    more."""
    file = tmp_path / "trained.pt"
    before = CartridgeFile(cartridge(), 8)
    convert.convert(before, file, "hazy")
    start = {"from": {"patient_01": str(file)}, "otherwise": "random_text"}
    process = run_to_end(command(tmp_path, **SHORT, cartridge__init=start))
    assert process.returncode == 0, process.stdout + process.stderr
    assert (
        f"from {file} (28 tokens, 8 frozen): patient_01\nby random_text: others" in process.stderr
    )
    assert "so by random_text: patient_02" in process.stdout
    first = latest(tmp_path)
    convert.convert(run_checkpoint.read(first, "patient_01"), tmp_path / "out.pt", "hazy")
    after = convert.read(tmp_path / "out.pt")
    assert after.frozen == 8
    assert torch.equal(bits(after.kv[..., :8, :]), bits(before.kv[..., :8, :]))
    assert (after.kv - before.kv)[..., 8:, :].abs().amax(dim=(1, 2, 4)).min() > 0

    sets = {**SHORT, "data.patients": 3, "train.steps": 1, "rollout.prompts": 9}
    process = run_to_end(command(tmp_path, "--continue", "latest", **sets))
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"a new run after {first.name}, version-000003: Adam's moments and the" in process.stderr
    assert "cartridge.tokens" not in process.stderr
    for key in ("data.patients", "train.steps"):
        assert key in process.stderr
    assert "so by first_tokens: patient_03" in process.stdout
    second = latest(tmp_path)
    assert second != first
    record = json.loads((second / "start.json").read_text())
    assert record["patient_03"] == {"init": "first_tokens"}
    checkpoint = first / "checkpoints/version-000003"
    assert record["patient_01"]["from"] == str(checkpoint)
    assert [row["step"] for row in rows(second / "metrics.jsonl")] == [1]
    made = run_checkpoint.read_all(second)
    chain = [
        f"{run.name}/{v}" for run, v in ((second, "version-000001"), (first, "version-000003"))
    ]
    assert lineage(made["patient_01"].facts.source) == [*chain, str(file)]
    assert lineage(made["patient_02"].facts.source) == chain
    date = json.loads((second / "chat.json").read_text())["date"]
    assert {one.facts.source["chat_date"] for one in made.values()} == {date}

    # What both asked of the same cartridge has the same answers.
    def answers(run: Path, arm: str) -> dict[tuple[str, str], tuple[str, float]]:
        return {
            (row["id"], row["question_hash"]): (row["text"], row["nll"])
            for row in read_rows(run / "answers.jsonl") if row["arm"] == arm
        }  # fmt: skip

    ended, begun = answers(first, "on_policy"), answers(second, "untrained")
    both = ended.keys() & begun.keys()
    assert len(both) >= 4
    for question in both:
        assert begun[question][0] == ended[question][0]
        assert begun[question][1] == pytest.approx(ended[question][1], rel=1e-4)


def test_a_cartridge_of_other_weights_is_refused_with_both_hashes(tmp_path: Path) -> None:
    base = read_base(READER)
    facts = Provenance("other", base.config_sha256, "0" * 64, "float32", base.rope)
    file = tmp_path / "other.safetensors"
    convert.convert(CartridgeFile(cartridge(), 1, facts), tmp_path / "other", "forge")
    (tmp_path / "other/cartridge.safetensors").rename(file)
    process = run_to_end(command(tmp_path, **SHORT, cartridge__init={"from": str(file)}))
    assert process.returncode != 0
    assert "was trained with other weights (000000000000, these are" in process.stderr
    assert "cartridge.init cannot start patient_01 and 1 more from" in process.stderr
