"""The shipped mesh from the command line to its results, cut down to a few steps."""

from __future__ import annotations

import json
import re
import stat
from collections import Counter

import pytest
from small_run import SMALL, Finished, rows

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.documents.study.longhealth import LongHealthPrompts, read_patients
from cartridge_forge.protocols.records.run_files import PHASES, WITHIN
from cartridge_forge.protocols.spec.loading import load_resolved

ARMS = {"none", "document", "untrained", "offline", "on_policy"}
STEPS = SMALL["train.steps"]


def test_the_directory_is_complete_and_the_end_says_where(finished: Finished) -> None:
    names = {p.name for p in finished.path.iterdir()}
    files = {
        "spec.yaml", "metrics.jsonl", "rollouts.jsonl", "answers.jsonl", "events.jsonl",
        "results.json", "terms.json", "token_scores.jsonl", "chat.json", ".lease",
    }  # fmt: skip
    names.discard("stacks")  # of a start that busy cores drew out
    assert files | {"checkpoints", "report.html", "trace.json"} == names
    assert list((finished.path / "checkpoints").glob("version-*"))
    tail = finished.process.stdout.splitlines()[-20:]
    for arm in ARMS:
        assert any(arm in line for line in tail), arm
    assert any(str(finished.path) in line for line in tail)


def test_results_hold_what_they_promise(finished: Finished) -> None:
    results = json.loads((finished.path / "results.json").read_text())
    assert results["status"] == "finished"
    assert set(results["arms"]) == ARMS
    for measured in [m for a in results["arms"].values() for m in (a, a["sampled"])]:
        low, high = measured["ci95"]
        assert 0 <= low <= measured["accuracy"] <= high <= 1
        assert measured["n"] == SMALL["evaluate.questions"]
        assert 0 <= measured["parse_failures"] <= measured["n"]
    trained = [r for r in rows(finished.path / "metrics.jsonl") if r["arm"] == "on_policy"]
    assert results["kl"] == {"first": trained[0]["kl"], "last": trained[-1]["kl"]}
    held = results["compression"]
    assert held["ratio"] == pytest.approx(held["document_tokens"] / held["cartridge_tokens"])
    sampled = [r for r in rows(finished.path / "rollouts.jsonl") if r["arm"] == "on_policy"]
    tokens = sum(len(r["response_ids"]) for r in sampled)
    assert results["policy"] == {
        "rollouts": STEPS * SMALL["rollout.prompts"], "tokens": tokens, "stale_tokens": 0,
    }  # fmt: skip
    # Equal tokens: the last offline step may go over, no step more.
    offline = [r["tokens"] for r in rows(finished.path / "metrics.jsonl") if r["arm"] == "offline"]
    assert sum(offline) >= tokens > sum(offline[:-1])
    assert results["tokens_trained"] == {"on_policy": tokens, "offline": sum(offline)}
    phases = results["phases"]
    assert set(phases) == {*PHASES, *WITHIN, "step"}
    parts = phases["rollout"] + phases["score"] + phases["train"] + phases["publish"]
    assert parts == pytest.approx(phases["step"], rel=1e-3)
    timed = {"on_policy": [], "offline": []}
    for row in rows(finished.path / "events.jsonl"):
        if row["event"] == "step":
            timed[row["arm"]].append(row["seconds"]["step"])
    means = {arm: sum(each) / len(each) for arm, each in timed.items()}
    assert results["step_seconds"] == pytest.approx(means, abs=1e-5)
    assert 0 < results["orchestration_share"] < 1
    cpu = results["cpu"]
    assert cpu["share"] == pytest.approx(cpu["orchestration"] / cpu["all"], abs=1e-3)
    assert 0 < cpu["share"] < 1
    assert results["wall_seconds"] > STEPS * phases["step"]


def test_every_step_is_recorded_once_with_its_version(finished: Finished) -> None:
    metrics = [r for r in rows(finished.path / "metrics.jsonl") if r["arm"] == "on_policy"]
    assert [r["step"] for r in metrics] == list(range(1, STEPS + 1))
    assert [r["version"] for r in metrics] == list(range(1, STEPS + 1))
    assert [r["step"] for r in metrics if r["accuracy"] is not None] == [3, 6]
    sampled = [r for r in rows(finished.path / "rollouts.jsonl") if r["arm"] == "on_policy"]
    assert len({r["id"] for r in sampled}) == len(sampled)
    assert Counter(r["step"] for r in sampled) == dict.fromkeys(
        range(1, STEPS + 1), SMALL["rollout.prompts"]
    )
    for r in sampled:  # strict: the version that the step trains, on every token
        assert set(r["versions"]) == {r["step"] - 1}
        assert len(r["versions"]) == len(r["response_ids"]) == len(r["sampler_logprobs"])


def test_no_training_prompt_is_an_evaluation_prompt(finished: Finished) -> None:
    """Over the run's own tokens, not by trusting the split."""
    learn = load_resolved(finished.path / "spec.yaml").learn
    tasks = LongHealthPrompts(learn, read_patients(learn.data), load_tokenizer(learn.model.path))
    exams = {e.prompt_ids for e in tasks.exams}
    words = {tasks.decode(e.prompt_ids).split("?")[0] for e in tasks.exams}
    asked = {tuple(r["prompt_ids"]) for r in rows(finished.path / "rollouts.jsonl")}
    assert len(exams) == SMALL["evaluate.questions"]
    assert not exams & asked
    assert not words & {tasks.decode(ids).split("?")[0] for ids in asked}


def test_the_report_needs_no_network(finished: Finished) -> None:
    page = (finished.path / "report.html").read_text()
    fetched = re.findall(r"(?:src|href)\s*=\s*[\"'](?!#)(?!data:)([^\"']+)", page)
    assert not [f for f in fetched if "//" in f]
    assert page.count("<svg") >= 1
    for arm in ARMS:
        assert arm in page


def test_the_events_tell_the_run(finished: Finished) -> None:
    events = rows(finished.path / "events.jsonl")
    names = [e["event"] for e in events]
    assert names[0] == "run_started"
    assert names[-1] == "finished"
    ready = {e["role"]: e["replicas"] for e in events if e["event"] == "role_ready"}
    assert ready == {"store": 1, "generator": 2, "doc_teacher": 1, "trainer": 1}
    assert {e["arm"] for e in events if e["event"] == "evaluated"} == ARMS


def test_every_document_is_read_once_and_each_generators_reply_is_a_part(
    finished: Finished,
) -> None:
    steps = [e for e in rows(finished.path / "events.jsonl") if e["event"] == "step"]
    looked_up = [e["documents"] for e in steps]
    assert looked_up[0]["misses"] + looked_up[1]["misses"] == SMALL["data.patients"]
    assert [d["misses"] for d in looked_up[2:]] == [0] * (len(steps) - 2)
    # Two replies a step on policy, each about both documents; offline all of a step together.
    assert {d["hits"] + d["misses"] for d in looked_up[:STEPS]} <= {2, 3, 4}
    assert {d["host_hits"] + d["evictions"] for d in looked_up} == {0}
    assert all(e["hidden"] >= 0 for e in steps)
    assert {e["hidden"] for e in steps if e["arm"] == "offline"} == {0.0}


def test_with_staleness_one_every_token_is_one_version_behind(stale: Finished) -> None:
    sampled = rows(stale.path / "rollouts.jsonl")
    assert sampled
    for r in sampled:  # step s trains version s - 1; the first step's tokens cannot be older
        assert set(r["versions"]) == {max(0, r["step"] - 2)}
    policy = json.loads((stale.path / "results.json").read_text())["policy"]
    late = sum(len(r["response_ids"]) for r in sampled if r["step"] > 1)
    assert policy["stale_tokens"] == late


def test_the_directory_and_its_files_are_their_owner_s_alone(finished: Finished) -> None:
    modes = {p: stat.S_IMODE(p.lstat().st_mode) for p in (finished.path, *finished.path.rglob("*"))}
    assert {p: oct(mode) for p, mode in modes.items() if mode & 0o077} == {}
