"""Test a whole run, and what reads it: eval, frontier, served answers."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from finished_runs import FORGE, compared
from openai import OpenAI
from other_user import run_closed
from served import documented_nll, serve_command
from small_run import MESH, SMALL, Finished, rows, run_to_end

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.clinic.text import right_answer
from cartridge_forge.plugins.documents.study.longhealth import LongHealthPrompts, read_patients
from cartridge_forge.plugins.spec_files.loading import load_resolved
from cartridge_forge.protocols.records.run_files import PHASES, WITHIN

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
    assert "page Run draws the curves" in page
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


SPEC = "questions: 8\npassages: 1\npassage_tokens: 12\nprobes: 2\nresamples: 200\n"
CODE = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"


def test_every_arm_sits_the_same_exam(finished: Finished, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.path, run)  # the run's own tests count its files
    (tmp_path / "eval.yaml").write_text(SPEC)
    words = [sys.executable, "-c", CODE, "eval", str(run), "--spec", str(tmp_path / "eval.yaml")]
    process = run_closed(words)
    assert process.returncode == 0, process.stdout + process.stderr
    told = json.loads((run / "eval.json").read_text())
    rows = {row["arm"]: row for row in told["rows"]}
    assert list(rows) == [
        "none", "document", "truncated", "untrained", "retrieved", "offline",
        "offline, retrieved", "on_policy", "on_policy, retrieved",
    ]  # fmt: skip
    # The run measured its arms on these very questions.
    results = json.loads((run / "results.json").read_text())
    for arm, result in results["arms"].items():
        row = rows[arm]
        assert (row["n"], row["accuracy"]) == (result["n"], result["accuracy"]), arm
        assert row["parse_failures"] == result["parse_failures"]
    for arm in ("offline", "on_policy"):
        assert rows[arm]["trained_tokens"] == results["tokens_trained"][arm]
        assert rows[arm]["compression"] == pytest.approx(results["compression"]["ratio"])
    assert rows["document"]["teacher"]["kl"] == pytest.approx(0.0, abs=1e-4)
    assert told["contamination"]["exact"] == 0
    assert told["contamination"]["prompts"] > 0
    assert len(told["pairs"]) == 9 * 8 // 2
    assert len((run / "eval_answers.jsonl").read_text().splitlines()) == 9 * (2 * 8 + 2 * 2)
    assert "## what the arms do by themselves" in (run / "eval.md").read_text()
    assert "differences in accuracy, paired bootstrap over 2 documents" in process.stdout
    assert "| on_policy | 28 | 8." in (run / "eval.md").read_text()
    for name in ("eval.html", "report.html"):
        assert "accuracy against compression" in (run / name).read_text()
    assert (run / "eval-training.svg").read_text().startswith("<svg ")


def test_strategies_are_compared_and_the_report_tells(finished: Finished, tmp_path: Path) -> None:
    run, said, [told] = compared(finished, tmp_path, times=1)
    assert "self_consistency samples=4" in said
    assert "self_consistency samples=4" in (run / "report.html").read_text()
    rows = told["arms"]
    assert [row["n"] for row in rows] == [6] * 5
    assert [row["calls"] for row in rows[:2]] == [1, 1]
    assert rows[0]["tokens"] < rows[1]["tokens"] <= 4 * 20


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    process = run_to_end([sys.executable, "-c", FORGE, "frontier", str(tmp_path)])
    assert process.returncode != 0
    assert "is no run directory" in process.stderr


ROOT = MESH.parents[1]


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
