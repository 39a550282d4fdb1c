"""meshes/documents.yaml from the command line, whole, with rollouts that the documents verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from documents_runs import ARTICLES, command, directory
from small_run import run_to_end

from cartridge_forge.protocols.files import read_rows

pytestmark = [pytest.mark.timeout(900)]  # a busy machine starts it slowly

SETS: dict[str, Any] = {
    "train.steps": 4, "train.warm_start": {"steps": 1}, "rollout.prompts": 9,
    "evaluate.questions": 3, "evaluate.arms": ["on_policy"],
}  # fmt: skip


def trained(root: Path, **sets: Any) -> Path:
    words = command(root, ARTICLES)
    for key, value in {**SETS, **sets}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    process = run_to_end(words)
    assert process.returncode == 0, process.stdout + process.stderr
    path = directory(root)
    results = json.loads((path / "results.json").read_text())
    assert results["status"] == "finished"
    assert results["arms"]["on_policy"]["agreement"]["kl"] > 0
    return path


@pytest.mark.parametrize("rule", ["threshold", "exact"])
def test_self_study_over_documents_is_verified(tmp_path: Path, rule: str) -> None:
    """After one warm step every token has the student's log-probability by the version that is
    trained, and the teacher's are named; JSD trains on both sides' likeliest."""
    path = trained(
        tmp_path,
        **{"rollout.verify": {"rule": rule, "block": 6}, "teacher.top_k_of": "both",
           "loss.direction": "jsd", "loss.beta": 0.5},
    )  # fmt: skip
    metrics, sampled = read_rows(path / "metrics.jsonl"), read_rows(path / "rollouts.jsonl")
    assert {v for r in sampled if r["step"] == 1 for v in r["versions"]} == {-1}
    assert "verified" not in metrics[0]
    for row in metrics[1:]:
        own = [r for r in sampled if r["step"] == row["step"]]
        assert len(own) == 9
        assert {v for r in own for v in r["versions"]} == {row["step"] - 1}
        tokens = sum(len(r["response_ids"]) for r in own)
        assert row["tokens"] == row["sampler_gap"]["tokens"] == tokens
        verified = row["verified"]
        assert verified["taught"] == sum(len(r.get("taught", ())) for r in own) > 0
        assert verified["share"] == verified["accepted"] / verified["judged"]
    result = json.loads((path / "results.json").read_text())["verified"]
    assert result["last"] == metrics[-1]["verified"]["share"]


def test_a_mixture_over_documents(tmp_path: Path) -> None:
    mix = {"verified": 1 / 3, "plain": 1 / 3, "teacher": 1 / 3}
    sets = {"rollout.verify": {"block": 6}, "train.mix": mix, "rollout.until_refused": 0.05}
    path = trained(tmp_path, **sets)
    sampled = read_rows(path / "rollouts.jsonl")
    for row in read_rows(path / "metrics.jsonl")[1:]:
        own = [r for r in sampled if r["step"] == row["step"]]
        teachers = [r for r in own if set(r["versions"]) == {-1}]
        assert len(teachers) == 3
        assert row["tokens"] == sum(len(r["response_ids"]) - len(r.get("masked", ())) for r in own)
    assert any(r.get("masked") for r in sampled)
    assert any(r.get("taught") for r in sampled)
