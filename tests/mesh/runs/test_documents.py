"""meshes/documents.yaml from the command line over a folder with odd files in it; killed and
resumed, it ends the same."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pdfs import pdf
from small_run import ROOT, run_to_end, running

from protocols.files import read_rows
from protocols.spec.users.documents import SEED_KINDS
from registry.terms import read_terms

pytestmark = [pytest.mark.timeout(900)]  # a busy machine starts it slowly

ARTICLES = ROOT / "tests" / "data" / "articles"
SMALL: dict[str, Any] = {
    "self_study.questions": 6,
    "self_study.mix": dict.fromkeys(SEED_KINDS, 1),
    "self_study.min_chunk": 100,
    "self_study.max_chunk": 300,
    "self_study.question_tokens": 40,
    "rollout.prompts": 21,
    "rollout.max_tokens": 16,
    "train.steps": 10,
    "train.lr": 0.3,  # the tiny model's keys and values are large
    "train.lr_scale": "absolute",
    "train.warmup_steps": 1,
    "train.row_tokens": 256,
    "train.checkpoint_every": 2,
    "train.warm_start": {"steps": 3},
    "evaluate.questions": 12,
    "evaluate.probe_every": 0,
    "evaluate.max_tokens": 12,
    "roles.generator.replicas": 1,
    "roles.doc_teacher.threads": 1,
    "roles.trainer.threads": 1,
    "spares": 0,
}


def command(root: Path, folder: Path, *extra: str) -> list[str]:
    code = "import sys; from forge_run.cli import forge_run; sys.exit(forge_run())"
    mesh = str(ROOT / "meshes" / "documents.yaml")
    words = [sys.executable, "-c", code, mesh, "--run-dir", str(root), *extra]
    for key, value in {"data.path": str(folder), **SMALL}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return words


def directory(root: Path) -> Path:
    return (root / "documents" / "latest").resolve()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three articles, and what a user's folder has beside: a book, a PDF, an old encoding, and what
    nobody can read."""
    home = tmp_path_factory.mktemp("docs") / "folder"
    shutil.copytree(ARTICLES, home)
    story = (ARTICLES / "salt.txt").read_text()
    (home / "book.md").write_text("\n\n".join(f"Chapter {i}.\n\n{story}" for i in range(6)))
    (home / "old.txt").write_bytes(story.replace("salt", "Käse").encode("cp1252"))
    (home / "printed.pdf").write_bytes(pdf([f"Page {i} of the tale of salt. " * 9 for i in (1, 2)]))
    (home / "empty.txt").write_bytes(b"")
    (home / "program.txt").write_bytes(b"\x7fELF\x00\x01\x02" * 50)
    (home / "torn.jsonl").write_text('{"text": "whole"}\n{"text": "to')
    return home


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    root = tmp_path_factory.mktemp("calm")
    process = run_to_end(command(root, folder))
    assert process.returncode == 0, process.stdout + process.stderr
    for told in ("empty.txt is empty", "program.txt is binary", "torn.jsonl line 2 is not JSON",
                 "old.txt is not UTF-8: read as cp1252", "book.md has"):  # fmt: skip
        assert told in process.stderr
    return directory(root)


def test_a_folder_is_trained_on_measured_and_reported(calm: Path) -> None:
    read = json.loads((calm / "documents.json").read_text())
    names = [d["name"] for d in read["documents"]]
    assert names == [
        "book.part_01", "book.part_02", "coast.lighthouse", "kestrel", "old", "printed", "salt",
    ]  # fmt: skip
    assert {x.split()[0] for x in read["left_out"]} == {"empty.txt", "program.txt", "torn.jsonl"}
    results = json.loads((calm / "results.json").read_text())
    assert results["status"] == "finished"
    agreement = {name: arm["agreement"] for name, arm in results["arms"].items()}
    assert agreement["document"]["kl"] == pytest.approx(0.0, abs=1e-5)
    assert agreement["document"]["top1"] == 1.0
    assert agreement["on_policy"]["kl"] < agreement["untrained"]["kl"]
    # Four of the seven tell one story, so words alone do not tell them apart.
    routing = results["arms"]["on_policy"]["routing"]
    assert (routing["n"], sorted(read_terms(calm / "terms.json"))) == (12, names)
    assert 0 < routing["accuracy"] < 1
    routed = [a for a in read_rows(calm / "answers.jsonl") if a["arm"] == "routed"]
    own = {a["id"]: a["nll"] for a in read_rows(calm / "answers.jsonl") if a["arm"] == "on_policy"}
    same = sum(own[a["id"]] == a["nll"] for a in routed)
    assert same == pytest.approx(routing["accuracy"] * routing["n"])
    rows = read_rows(calm / "metrics.jsonl")
    assert rows[-1]["kl"] < rows[0]["kl"]
    assert {row["stale_tokens"] for row in rows} == {0}
    rollouts = read_rows(calm / "rollouts.jsonl")
    for row in rollouts:  # the teacher's text for three steps, then the cartridge's own
        assert set(row["versions"]) == ({-1} if row["step"] <= 3 else {row["step"] - 1})
    assert results["warm_steps"] == 3
    events = read_rows(calm / "events.jsonl")
    assert [e["step"] for e in events if e["event"] == "switched"] == [4]
    study = read_rows(calm / "selfstudy.jsonl")
    assert len(study) == 6 * len(names)
    report = (calm / "report.html").read_text()
    assert "<h2>Documents</h2>" in report
    assert "program.txt is binary" in report


def test_a_run_that_was_killed_goes_on_to_the_same_end(
    calm: Path, folder: Path, tmp_path: Path
) -> None:
    with running(command(tmp_path, folder), tmp_path):
        wait_for(tmp_path, 5)  # the checkpoint of step 4 is there, and all are killed here
    process = run_to_end(command(tmp_path, folder, "--resume"))
    assert process.returncode == 0, process.stdout + process.stderr
    again = directory(tmp_path)
    for name in ("metrics.jsonl", "rollouts.jsonl", "documents.json"):
        assert (again / name).read_bytes() == (calm / name).read_bytes(), name
    found = [json.loads((p / "results.json").read_text()) for p in (again, calm)]
    assert found[0]["arms"] == found[1]["arms"]


def test_rows_with_their_scores_are_trained_on_without_a_teacher(
    folder: Path, tmp_path: Path
) -> None:
    sets = {"data.path": str(folder / "salt.txt"), **SMALL, "self_study.answer_tokens": 16}
    code = "import sys; from forge_run.cli import forge; sys.exit(forge())"
    words = [sys.executable, "-c", code, "selfstudy", str(ROOT / "meshes" / "documents.yaml")]
    words += ["--out", str(tmp_path / "study")]
    for key, value in {**sets, "self_study.questions": 16, "self_study.top_k": 12}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    process = run_to_end(words)
    assert process.returncode == 0, process.stdout + process.stderr
    stored = {
        "self_study.rows": str(tmp_path / "study" / "rows.jsonl"), "self_study.scores": "stored",
        "train.warm_start": {"steps": 10}, "evaluate.arms": ["untrained", "on_policy"],
    }  # fmt: skip
    words = [x for k, v in stored.items() for x in ("--set", f"{k}={json.dumps(v)}")]
    process = run_to_end([*command(tmp_path / "runs", folder / "salt.txt"), *words])
    assert process.returncode == 0, process.stdout + process.stderr
    done = directory(tmp_path / "runs")
    rows = read_rows(done / "metrics.jsonl")
    assert {version for r in read_rows(done / "rollouts.jsonl") for version in r["versions"]} == {
        -1
    }
    assert rows[-1]["kl"] < 0.5 * rows[0]["kl"]  # 0.06 of 0.77
    steps = [e for e in read_rows(done / "events.jsonl") if e["event"] == "step"]
    assert {e["bytes"]["scores"] for e in steps} == {0}
    assert {n for e in steps for n in e["documents"].values()} == {0}  # look-ups of the teacher's


def wait_for(root: Path, step: int, timeout: float = 240.0) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        file = directory(root) / "metrics.jsonl"
        if any(row["step"] >= step for row in (read_rows(file) if file.exists() else [])):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} did not come within {timeout} s")
