"""Deaths in a run of meshes/three_channels.yaml change nothing of it, to the byte; teachers that
are all down are done without; a run that is stopped trains what it had sampled; the document's
teacher plays a warm start."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from channel_runs import (
    GROUP,
    STEPS,
    TASKS,
    WITHOUT_TEACHERS,
    command,
    directory,
    pids,
    wait_for,
    whole_run,
)
from chaos import OF_CHANNELS
from small_run import run_to_end, running

from cartridge_forge.learning.checkpoint import read_checkpoint
from cartridge_forge.plugins.chat.messages import PanelVerdict
from cartridge_forge.plugins.environments.episode_files import from_row
from cartridge_forge.plugins.replay.vote_records import from_row as record_from
from cartridge_forge.protocols.files import read_rows

SEVERAL_UPDATES = {
    "train.updates_per_rollout": 2,
    "train.minibatches": 2,
    "objective.grpo.kl": 0.05,
    "objective.grpo.kl_reference": "version",
    "objective.grpo.kl_refresh": 3,
    "objective.grpo.refill": 2,
}
WITHOUT_ASKING = (*(role for role in OF_CHANNELS if role != "teacher_replay"), "store")

AHEAD_STEPS, BOUND = 6, 2
AHEAD: dict[str, Any] = {
    **WITHOUT_TEACHERS,
    "train.steps": AHEAD_STEPS,
    "train.staleness": BOUND,
    "evaluate.arms": ["on_policy"],
    "evaluate.probe_every": 0,
}


def test_deaths_of_desk_hint_teacher_store_and_controller_change_nothing(tmp_path: Path) -> None:
    """kill -9 of each while it is wanted, then of the controller: the run that goes on by itself,
    and is resumed, ends as the undisturbed one does, to the byte. Also with four updates a step, a
    reference that is renewed, refills, the average of the cartridges that reads the hints, and
    hints that the generator writes."""
    hints = {"objective.sdpo.teacher": "ema", "objective.sdpo.hints": "model"}
    sets = WITHOUT_TEACHERS | SEVERAL_UPDATES | hints
    calm = whole_run(tmp_path / "calm", **sets).path
    rows = read_rows(calm / "metrics.jsonl")
    assert all(row["channels"]["grpo"].get("updates") == 4 for row in rows)
    assert sum(row["episodes"]["refill/sampled"] for row in rows) > 0
    assert any(row["channels"]["grpo"].get("approx_kl_last", 0) > 0 for row in rows)
    root = tmp_path / "struck"
    with running(command(root, **sets), root) as run:
        wait_for(root, 1)
        for role in WITHOUT_ASKING:
            (pid,) = pids(root)[role]
            os.kill(pid, signal.SIGKILL)
        wait_for(root, 2)
        (controller,) = [json.loads((directory(root) / "endpoints.json").read_text())["pid"]]
        os.kill(controller, signal.SIGKILL)
        run.process.communicate(timeout=180)
        run.wait_until_gone(60)
    lost = [
        e["role"]
        for e in read_rows(directory(root) / "events.jsonl")
        if e["event"] == "replica_lost"
    ]
    assert set(lost) >= set(WITHOUT_ASKING)
    process = run_to_end(command(root, "--resume", **sets))
    assert process.returncode == 0, process.stdout + process.stderr
    for name in ("metrics.jsonl", "episodes.jsonl"):
        assert (directory(root) / name).read_bytes() == (calm / name).read_bytes(), name


def test_teachers_that_are_all_down_are_done_without(tmp_path: Path) -> None:
    """The provider fails nearly every call, and every role of the channels is killed as well."""
    sets = {
        "replay.local.server_error": 0.99, "replay.local.rate_limit": 0.0,
        "replay.deadline_s": 3.0, "evaluate.arms": ["on_policy"],
    }  # fmt: skip
    with running(command(tmp_path, **sets), tmp_path) as run:
        wait_for(tmp_path, 1)
        for role in OF_CHANNELS:
            (pid,) = pids(tmp_path)[role]
            os.kill(pid, signal.SIGKILL)
        said, _ = run.process.communicate(timeout=180)
        assert run.process.returncode == 0, said
        run.wait_until_gone(60)
    path = directory(tmp_path)
    rows = read_rows(path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert any(row["channels"]["grpo"]["count"] for row in rows)  # where rewards varied
    verdicts = [record_from(row) for row in read_rows(path / "votes.jsonl")]
    verdicts = [v for v in verdicts if isinstance(v, PanelVerdict)]
    assert {v.reason for v in verdicts} <= {"too_few_votes", "not_worth_asking"}
    errors = {vote.error for v in verdicts for vote in v.votes}
    assert errors <= {"http_500", "circuit_open", "deadline", ""}
    # The record says what the training went on without.
    assert sum(row["episodes"].get("teachers/too_few_votes", 0) for row in rows) > 0
    lost = [e["role"] for e in read_rows(path / "events.jsonl") if e["event"] == "replica_lost"]
    assert set(lost) == set(OF_CHANNELS)


def check_ahead(path: Path) -> None:
    """Every step has its groups, each once and whole, and no token older than the bound."""
    rows = read_rows(path / "episodes.jsonl")
    assert Counter(row["step"] for row in rows) == dict.fromkeys(
        range(1, AHEAD_STEPS + 1), TASKS * GROUP
    )
    assert set(Counter(row["task"]["id"] for row in rows).values()) == {1}
    assert set(Counter((row["step"], row["group"]) for row in rows).values()) == {GROUP}
    ages = [
        row["step"] - 1 - version
        for row in rows
        for turn in from_row(row).turns
        for version in turn.versions
    ]
    assert min(ages) >= 0
    assert max(ages) <= BOUND
    assert max(ages) > 0  # something did run ahead
    told = [row["stale_tokens"] for row in read_rows(path / "metrics.jsonl")]
    assert sum(told) > 0
    assert told[0] == 0  # the first step trains the first version


def test_a_run_that_is_stopped_trains_what_it_had_sampled(tmp_path: Path) -> None:
    with running(command(tmp_path, **AHEAD), tmp_path) as run:
        wait_for(tmp_path, 2)
        run.stop()
    path = directory(tmp_path)
    newest = sorted((path / "checkpoints").glob("version-*"))[-1]
    state = read_checkpoint(newest).facts["position"]
    assert 2 <= state["step"] < AHEAD_STEPS
    pending = {
        rollout["step"] + 1: [e["task"]["id"] for e in rollout["episodes"]]
        for rollout in state["pending"]
    }
    assert list(pending) == list(
        range(state["step"] + 1, min(state["step"] + BOUND, AHEAD_STEPS) + 1)
    )
    done = run_to_end(command(tmp_path, "--resume", **AHEAD))
    assert done.returncode == 0, done.stdout + done.stderr
    check_ahead(path)
    trained: dict[int, list[str]] = {}
    for row in read_rows(path / "episodes.jsonl"):
        trained.setdefault(row["step"], []).append(row["task"]["id"])
    for step, episodes in pending.items():
        assert trained[step] == episodes
    for row in read_rows(path / "metrics.jsonl"):
        assert row["episodes"]["ahead/dropped"] >= 0
        if row["channels"]["grpo"]["count"]:  # else all its groups had one reward
            assert row["channels"]["grpo"]["ratio"] == pytest.approx(1.0)
            assert row["channels"]["grpo"]["mismatch_weight"] > 0


def test_the_document_teacher_plays_a_warm_start_and_the_offline_arm(tmp_path: Path) -> None:
    """Its text trains doc_kl alone; the offline arm ends with the step that reaches the tokens of
    the on-policy arm."""
    sets = {
        **WITHOUT_TEACHERS, "train.warm_start": {"steps": 1},
        "evaluate.arms": ["document", "untrained", "offline", "on_policy"],
    }  # fmt: skip
    path = whole_run(tmp_path, **sets).path
    rows = read_rows(path / "metrics.jsonl")
    arms = Counter(row["arm"] for row in rows)
    assert arms["on_policy"] == STEPS
    written = [row for row in rows if row["arm"] == "offline" or row["step"] == 1]
    assert len(written) == 1 + arms["offline"] < len(rows)
    for row in rows:
        doc, rest = row["channels"]["doc_kl"], ("grpo", "sdpo")
        assert doc["count"] > 0
        assert row["kl"] == doc["value"]
        trained = [row["channels"][name]["count"] for name in rest]
        if row in written:
            assert trained == [0, 0]
    # A step whose groups all have one reward has no tokens for grpo.
    assert any(row["channels"]["grpo"]["count"] for row in rows if row not in written)
    results = json.loads((path / "results.json").read_text())
    assert list(results["arms"]) == ["on_policy", "document", "untrained", "offline"]
    assert results["warm_steps"] == 1
    tokens = results["tokens_trained"]
    last = [row["tokens"] for row in rows if row["arm"] == "offline"][-1]
    assert tokens["offline"] - last < tokens["on_policy"] <= tokens["offline"]
    assert results["policy"]["stale_tokens"] == 0
    for row in read_rows(path / "episodes.jsonl"):
        versions = {v for turn in from_row(row).turns for v in turn.versions}
        offline = row["arm"] == "offline" or row["step"] == 1
        assert versions == ({-1} if offline else {row["step"] - 1})
        assert row["task"]["id"].startswith("offline/" if offline else "on_policy/")
