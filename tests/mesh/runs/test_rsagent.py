"""meshes/rsagent.yaml from the command line, cut down; killed and resumed, it ends the same."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from chaos import ROLES
from small_run import ROOT, run_to_end, running

from environments.episode_files import from_row
from learning.checkpoint import read_checkpoint
from protocols.files import read_rows

SMALL: dict[str, Any] = {
    "data.patients": 2,
    "train.steps": 4,
    "train.warmup_steps": 1,
    "train.checkpoint_every": 1,
    "rsa.M": 2,
    "rsa.N": 2,
    "rsa.K": 2,
    "rsa.T": 4,
    "rsa.examples": 2,
    "rsa.rollouts_per_example": 2,
    "rsa.advantage": "rollout",
    "evaluate.arms": ["untrained", "on_policy"],
    "evaluate.questions": 6,
    "evaluate.probe_every": 2,
    "evaluate.probe_questions": 3,
    "roles.generator.replicas": 1,
    "roles.trainer.threads": 1,
    "health.heartbeat_s": 0.3,
}
OF_RSA = [role.name for role in ROLES if role.of_rsa]
CANDIDATES = 4 * 4  # T populations of M * N


def command(root: Path, *extra: str) -> list[str]:
    code = "import sys; from forge_run.cli import forge_run; sys.exit(forge_run())"
    mesh = str(ROOT / "meshes" / "rsagent.yaml")
    words = [sys.executable, "-c", code, mesh, "--run-dir", str(root), *extra]
    for key, value in SMALL.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return words


def directory(root: Path) -> Path:
    return (root / "rsagent" / "latest").resolve()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("calm")
    process = run_to_end(command(root))
    assert process.returncode == 0, process.stdout + process.stderr
    return directory(root)


def test_a_run_trains_every_candidate_of_every_run_and_reports_its_populations(calm: Path) -> None:
    rows = read_rows(calm / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        told = row["episodes"]
        assert (told["count"], told["errored"], told["rsa/runs"]) == (4 * CANDIDATES, 0, 4)
        assert all(0 <= told[f"rsa/accuracy_{t}"] <= 1 for t in range(4))
        assert row["channels"]["grpo"]["count"] == row["tokens"]
        assert row["kl"] is None
    assert any(row["tokens"] for row in rows)  # where rewards varied within a problem
    episodes = [from_row(row) for row in read_rows(calm / "episodes.jsonl")]
    assert len(episodes) == 4 * 4 * CANDIDATES
    for step, part in enumerate([episodes[i : i + 64] for i in range(0, 256, 64)]):
        assert {v for e in part for t in e.turns for v in t.versions} == {step}  # on policy
        assert len({e.group for e in part}) == 2
    results = json.loads((calm / "results.json").read_text())
    before, after = (results["arms"][arm]["populations"] for arm in ("untrained", "on_policy"))
    gain = results["aggregation"]
    assert gain["last"] == after["accuracy"][-1] - before["accuracy"][-1]
    assert gain["first"] == after["accuracy"][0] - before["accuracy"][0]
    assert gain["aggregation"] == gain["last"] - gain["first"]
    report = (calm / "report.html").read_text()
    assert "<h2>Aggregation</h2>" in report
    assert "Training moved the last population by" in report


def test_deaths_of_aggregator_and_controller_change_nothing(calm: Path, tmp_path: Path) -> None:
    """kill -9 of the aggregator twice while runs go on, then of the controller: the resumed run
    ends as the undisturbed one did, to the byte."""
    with running(command(tmp_path), tmp_path) as run:
        for step in (1, 2):
            wait_for(tmp_path, "step", step)
            for role in OF_RSA:
                os.kill(pid_of(tmp_path, role), signal.SIGKILL)
        wait_for(tmp_path, "step", 3)
        controller = json.loads((directory(tmp_path) / "endpoints.json").read_text())["pid"]
        os.kill(controller, signal.SIGKILL)
        run.process.communicate(timeout=180)
        run.wait_until_gone(60)
    process = run_to_end(command(tmp_path, "--resume"))
    assert process.returncode == 0, process.stdout + process.stderr
    events = read_rows(directory(tmp_path) / "events.jsonl")
    lost = [e["role"] for e in events if e["event"] == "replica_lost"]
    assert all(lost.count(role) >= 2 for role in OF_RSA)
    for name in ("metrics.jsonl", "episodes.jsonl"):
        assert (directory(tmp_path) / name).read_bytes() == (calm / name).read_bytes(), name
    found = [json.loads((p / "results.json").read_text()) for p in (directory(tmp_path), calm)]
    assert found[0]["arms"] == found[1]["arms"]


def wait_for(root: Path, event: str, step: int, timeout: float = 180.0) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        file = directory(root) / "events.jsonl"
        told = read_rows(file) if file.exists() else []
        if any(e["event"] == event and e["step"] >= step for e in told):
            return
        time.sleep(0.02)
    raise AssertionError(f"{event} {step} did not come within {timeout} s")


def pid_of(root: Path, role: str) -> int:
    """Of the role's one replica, or of its newest successor, once that is there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        events = read_rows(directory(root) / "events.jsonl")
        lost = sum(e["event"] == "replica_lost" and e["role"] == role for e in events)
        back = [e["pid"] for e in events if e["event"] == "replica_back" and e["role"] == role]
        if len(back) == lost:
            (first,) = [e["pids"] for e in events if e.get("role") == role and "pids" in e]
            pid: int = [*first, *back][-1]
            return pid
        time.sleep(0.02)
    raise AssertionError(f"{role} did not come back")


def test_runs_that_are_ahead_of_training_are_kept_by_a_stop(tmp_path: Path) -> None:
    """No token is older than the bound, and a resumed run trains the runs that were ahead."""
    ahead = ("--set", "train.staleness=1")
    with running(command(tmp_path, *ahead), tmp_path) as run:
        wait_for(tmp_path, "step", 1)
        run.stop()
    path = directory(tmp_path)
    newest = sorted((path / "checkpoints").glob("version-*"))[-1]
    state = read_checkpoint(newest).facts["position"]
    (pending,) = state["pending"]
    assert pending["step"] == state["step"] < 4
    done = run_to_end(command(tmp_path, "--resume", *ahead))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_rows(path / "episodes.jsonl")
    assert {
        step: sum(row["step"] == step for row in rows) for step in range(1, 5)
    } == dict.fromkeys(range(1, 5), 4 * CANDIDATES)
    later = [row["task"]["id"] for row in rows if row["step"] == pending["step"] + 1]
    assert later == [e["task"]["id"] for e in pending["episodes"]]
    ages = {row["step"] - 1 - v for row in rows for t in from_row(row).turns for v in t.versions}
    assert ages == {0, 1}
    told = [row["episodes"] for row in read_rows(path / "metrics.jsonl")]
    assert all(each["rsa/runs"] == 4 and each["ahead/dropped"] >= 0 for each in told)
