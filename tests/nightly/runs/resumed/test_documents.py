"""meshes/documents.yaml over a folder of odd files: killed and resumed, it ends the same; and
over rows with their scores, without a teacher."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from documents_runs import SMALL, command, directory
from small_run import ROOT, run_to_end, running

from cartridge_forge.protocols.files import read_rows

pytestmark = [pytest.mark.timeout(900)]  # a busy machine starts it slowly


def test_a_run_that_was_killed_goes_on_to_the_same_end(
    over_documents: Path, odd_folder: Path, tmp_path: Path
) -> None:
    with running(command(tmp_path, odd_folder), tmp_path):
        wait_for(tmp_path, 5)  # the checkpoint of step 4 is there, and all are killed here
    process = run_to_end(command(tmp_path, odd_folder, "--resume"))
    assert process.returncode == 0, process.stdout + process.stderr
    again = directory(tmp_path)
    for name in ("metrics.jsonl", "rollouts.jsonl", "documents.json"):
        assert (again / name).read_bytes() == (over_documents / name).read_bytes(), name
    found = [json.loads((p / "results.json").read_text()) for p in (again, over_documents)]
    assert found[0]["arms"] == found[1]["arms"]


def test_kept_scores_are_equal_after_a_kill(odd_folder: Path, tmp_path: Path) -> None:
    """The document's own words, six questions in eight steps: each is read once, and once more
    after the kill."""
    sets = {
        "self_study.mix": {"recite": 1, "continue": 1}, "train.warm_start": {"steps": 8},
        "rollout.prompts": 4, "evaluate.arms": ["on_policy"],
    }  # fmt: skip
    words = [x for k, v in sets.items() for x in ("--set", f"{k}={json.dumps(v)}")]
    text = odd_folder / "salt.txt"
    for root in (tmp_path / "calm", tmp_path / "killed"):
        if root.name == "killed":
            with running([*command(root, text), *words], root):
                wait_for(root, 5)
            words.append("--resume")
        process = run_to_end([*command(root, text), *words])
        assert process.returncode == 0, process.stdout + process.stderr
    calm, killed = (directory(tmp_path / name) for name in ("calm", "killed"))
    for name in ("metrics.jsonl", "rollouts.jsonl", "answers.jsonl"):
        assert (killed / name).read_bytes() == (calm / name).read_bytes(), name
    steps = [e for e in read_rows(calm / "events.jsonl") if e["event"] == "step"]
    passes = [sum(e["documents"].values()) for e in steps if e["step"] <= 8]  # of the teacher
    trained = {
        tuple(r["response_ids"]) for r in read_rows(calm / "rollouts.jsonl") if r["step"] <= 8
    }
    assert sum(passes) == len(trained) < 8 * 4
    assert passes[-1] == 0


def wait_for(root: Path, step: int, timeout: float = 240.0) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        file = directory(root) / "metrics.jsonl"
        if any(row["step"] >= step for row in (read_rows(file) if file.exists() else [])):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} did not come within {timeout} s")


def test_rows_with_their_scores_are_trained_on_without_a_teacher(
    odd_folder: Path, tmp_path: Path
) -> None:
    sets = {"data.path": str(odd_folder / "salt.txt"), **SMALL, "self_study.answer_tokens": 16}
    code = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"
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
    process = run_to_end([*command(tmp_path / "runs", odd_folder / "salt.txt"), *words])
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
