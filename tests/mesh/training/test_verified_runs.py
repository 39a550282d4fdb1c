"""Verified rollouts through a whole mesh: who wrote what, and deaths in the middle of one."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from chaos import HASTY, STAGES, Blow, storm
from small_run import command, latest, rows, run_to_end, same_outcome

ON_POLICY = STAGES.index("on_policy")
SHORT: dict[str, Any] = {"train.steps": 3, "evaluate.arms": ["on_policy"], "rollout.prompts": 8}
EXACT: dict[str, Any] = {
    **SHORT, "train.steps": 8, "rollout.prompts": 16, "rollout.verify": {"rule": "exact"}, **HASTY,
    "teacher.top_k_of": "both",
}  # fmt: skip


def finished(root: Path, **sets: Any) -> Path:
    process = run_to_end(command(root, **sets))
    assert process.returncode == 0, process.stdout + process.stderr
    return latest(root)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("exact"), **EXACT)


def check_provenance(path: Path) -> None:
    """Every token has the version that the step trains and the student's log-probability, which the
    trainer compared; those of the teacher are named, and counted in the step's row."""
    metrics = rows(path / "metrics.jsonl")
    sampled = rows(path / "rollouts.jsonl")
    for row in metrics:
        own = [r for r in sampled if r["step"] == row["step"]]
        tokens = sum(len(r["response_ids"]) for r in own)
        assert {v for r in own for v in r["versions"]} == {row["step"] - 1}
        assert row["tokens"] == row["sampler_gap"]["tokens"] == tokens
        assert row["sampler_gap"]["max"] < 1e-4
        verified = row["verified"]
        assert verified["taught"] == sum(len(r.get("taught", ())) for r in own)
        assert verified["proposed"] >= verified["judged"] >= verified["accepted"]
        assert verified["accepted"] + verified["taught"] >= tokens
        assert verified["share"] == verified["accepted"] / verified["judged"]
    result = json.loads((path / "results.json").read_text())["verified"]
    for name in ("proposed", "judged", "accepted", "taught"):
        assert result[name] == sum(row["verified"][name] for row in metrics)
    assert result["first"] == metrics[0]["verified"]["share"]
    assert result["last"] == metrics[-1]["verified"]["share"]
    assert result["taught"] > 0


def test_threshold_runs_tell_who_wrote_each_token(tmp_path: Path) -> None:
    path = finished(tmp_path, **SHORT, **{"rollout.verify": {"rule": "threshold", "block": 6}})
    check_provenance(path)


def test_exact_runs_tell_who_wrote_each_token(exact: Path) -> None:
    check_provenance(exact)


def test_a_mixture_trains_on_samples_of_all_three(tmp_path: Path) -> None:
    mix = {"verified": 0.5, "plain": 0.25, "teacher": 0.25}
    path = finished(
        tmp_path, **SHORT,
        **{"rollout.verify": {}, "train.mix": mix, "rollout.until_refused": 0.05},
    )  # fmt: skip
    sampled = rows(path / "rollouts.jsonl")
    for row in rows(path / "metrics.jsonl"):
        own = [r for r in sampled if r["step"] == row["step"]]
        teachers = [r for r in own if set(r["versions"]) == {-1}]
        assert len(teachers) == 2
        assert all(set(r["versions"]) == {row["step"] - 1} for r in own if r not in teachers)
        trained = sum(len(r["response_ids"]) - len(r.get("masked", ())) for r in own)
        assert row["tokens"] == trained
    assert any(r.get("masked") for r in sampled)


@pytest.mark.timeout(600)
def test_deaths_in_verified_rollouts_change_no_byte(exact: Path, tmp_path: Path) -> None:
    """kill -9 of each role while a rollout is verified: the generator that proposes, the teacher
    that holds the responses' keys and values, the store that carries the logits, the trainer, and
    the controller, after which the run is resumed."""
    blows = [
        Blow((ON_POLICY, 1), "generator", phase="rollout"),
        Blow((ON_POLICY, 2), "doc_teacher", phase="rollout"),
        Blow((ON_POLICY, 3), "store", phase="rollout"),
        Blow((ON_POLICY, 4), "trainer", phase="rollout"),
        Blow((ON_POLICY, 5), "controller", phase="rollout"),
    ]
    done = storm(tmp_path, blows, timeout=400, **EXACT)
    assert len(done.struck) == len(blows)
    assert done.code == 0, done.story()
    same_outcome(latest(tmp_path), exact)


def test_a_run_warns_once_of_mistakes_and_of_an_unseen_student(tmp_path: Path) -> None:
    """A short cartridge that recites makes mistakes early, and has its mass outside the teacher's
    top 2. Event, console and report say so; verified text has no token behind a mistake."""
    recite = {**SHORT, "rollout.kinds": ["recite"], "rollout.max_tokens": 64,
              "cartridge.tokens": 16}  # fmt: skip
    loss = {"loss.direction": "reverse", "teacher.top_k": 2}
    process = run_to_end(command(tmp_path / "plain", **recite, **loss))
    assert process.returncode == 0, process.stdout + process.stderr
    path = latest(tmp_path / "plain")
    told = [e["message"] for e in rows(path / "events.jsonl") if e["event"] == "warned"]
    behind = [t for t in told if "of the trained tokens lie behind a token" in t]
    unseen = [t for t in told if "of the student's probability in the teacher's top 2" in t]
    assert len(behind) == len(unseen) == 1
    for text in (*behind, *unseen):
        assert text.startswith("step 1: ")
        assert process.stdout.count(f"warning: {text}") == 1
        assert text in unescape((path / "report.html").read_text())
    verified = finished(tmp_path / "verified", **recite, **{"rollout.verify": {"block": 6}})
    assert "warned" not in {e["event"] for e in rows(verified / "events.jsonl")}


@pytest.mark.timeout(600)
def test_the_offline_arms_text_is_made_by_the_exact_machine(tmp_path: Path) -> None:
    """Its tokens are the teacher's (version -1), most of them proposed by the model without the
    document; and the same to the byte where the teacher dies while they are written, and where the
    run is killed behind them and writes them again."""
    sets = {
        **SHORT, **HASTY, "rollout.verify": {"rule": "exact", "block": 4},
        "evaluate.arms": ["on_policy", "offline"],
    }  # fmt: skip
    calm = finished(tmp_path / "calm", **sets)
    offline = [r for r in rows(calm / "rollouts.jsonl") if r["arm"] == "offline"]
    assert {v for r in offline for v in r["versions"]} == {-1}
    tokens = sum(len(r["response_ids"]) for r in offline)
    assert 0 < sum(len(r.get("taught", ())) for r in offline) < tokens
    assert all("verified" not in r for r in rows(calm / "metrics.jsonl") if r["arm"] == "offline")
    blows = [
        Blow((STAGES.index("on_policy!"), 0), "doc_teacher", phase="rollout"),
        Blow((STAGES.index("offline"), 1), "controller"),
    ]
    done = storm(tmp_path / "storm", blows, timeout=400, **sets)
    assert len(done.struck) == len(blows)
    assert done.code == 0, done.story()
    same_outcome(latest(tmp_path / "storm"), calm)
