"""The plan of a run that trains by recursive self-aggregation: its numbers by hand."""

from __future__ import annotations

from pathlib import Path

from forge_run.figures import Section
from forge_run.plan import plan
from protocols.spec_loading import load_spec

MESH = str(Path(__file__).parents[2] / "meshes" / "rsagent.yaml")


def planned(*sets: str) -> dict[str, dict[str, tuple[str, ...]]]:
    loaded = load_spec(MESH, sets=sets)
    sections: tuple[Section, ...] = plan(loaded.spec, loaded.place)
    return {s.title: {row[0]: row[1:] for row in s.rows} for s in sections}


def test_the_budget_counts_candidates() -> None:
    """2 problems x 3 runs x 6 populations x 4 x 2 = 288 candidates of 24 tokens a step."""
    found = planned(
        "rsa.M=4", "rsa.N=2", "rsa.K=2", "rsa.T=6", "rsa.advantage=rollout", "rsa.examples=2",
        "rsa.rollouts_per_example=3",
        "train.steps=10", "train.warmup_steps=0", "rollout.max_tokens=24",
        "evaluate.arms=[untrained, on_policy]", "evaluate.questions=5", "evaluate.probe_every=3",
    )  # fmt: skip
    budget = {what: text for what, (text,) in found["budget"].items()}
    assert budget["a run"].endswith(": 48 candidates in 6 calls")
    assert budget["runs"] == "3 a problem, 6 a step, 60 in all"
    assert budget["candidates"] == "288 a step, 2,880 in all, each a training sample"
    assert budget["response tokens"] == "at most 6,912 a step, 69,120 in all"
    assert budget["evaluation"] == "480 candidates: untrained, on_policy"
    assert "cannot run here yet" not in found
    assert found["channels"]["doc_kl"] == ("0", "left out")
    assert found["channels"]["grpo"][1] == (
        "mean_accuracy of the last population, compared among 3 runs of a problem"
    )


def test_problems_about_no_document_have_a_page() -> None:
    found = planned(
        'data={"source": "primer", "patients": 1, "held_out": 1.0}', "rsa.task=rg",
        'rsa.problems={"kind": "reasoning_gym", "name": "chain_sum"}', "objective.w_doc=0.5",
        "rsa.advantage=population",
    )  # fmt: skip
    assert found["plan of rsagent"]["data"] == (
        "a page on solving problems, for reasoning_gym: chain_sum",
    )
    assert "0.5" in found["channels"]["doc_kl"][0]
    assert found["channels"]["grpo"][1].startswith("each candidate's own score")
