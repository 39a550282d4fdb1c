"""Verified rollouts whose student is sampled by vLLM: the run of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_run import command, latest, rows, run_to_end
from vllm_replica import require_vllm

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SETS: dict[str, Any] = {
    "train.steps": 2, "evaluate.arms": ["on_policy"], "evaluate.probe_every": 0,
    "rollout.verify": {"rule": "threshold", "block": 6}, "teacher.top_k_of": "both",
    "roles.generator.replicas": 1,
}  # fmt: skip


def run(root: Path, **sets: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    done = run_to_end(command(root, **SETS, **sets), timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return rows(latest(root) / "metrics.jsonl"), rows(latest(root) / "rollouts.jsonl")


def test_the_document_verifies_what_vllm_proposes(tmp_path: Path) -> None:
    """Who wrote each token, and the student's log-probability of the teacher's. The first step is
    that of the embedded engine: its student has the same numbers, and the draws are named."""
    metrics, sampled = run(
        tmp_path / "vllm", **{"generator.backend": "vllm", "generator.kv_gib": 0.1}
    )
    for row in metrics:
        own = [r for r in sampled if r["step"] == row["step"]]
        tokens = sum(len(r["response_ids"]) for r in own)
        assert {v for r in own for v in r["versions"]} == {row["step"] - 1}
        assert row["tokens"] == row["sampler_gap"]["tokens"] == tokens
        assert row["sampler_gap"]["max"] < 1e-3
        verified = row["verified"]
        assert verified["taught"] == sum(len(r.get("taught", ())) for r in own) > 0
    embedded, text = run(tmp_path / "torch")
    first, same = ([r for r in s if r["step"] == 1] for s in (sampled, text))
    for one, other in zip(first, same, strict=True):
        assert one["response_ids"] == other["response_ids"]
        assert one.get("taught") == other.get("taught")
        assert one["sampler_logprobs"] == pytest.approx(other["sampler_logprobs"], abs=1e-4)
    assert metrics[0]["kl"] == pytest.approx(embedded[0]["kl"], rel=1e-4)
    assert metrics[0]["verified"] == embedded[0]["verified"]
