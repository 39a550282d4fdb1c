"""Runs of meshes/rsagent.yaml that are killed or stopped, and resumed, end the same."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from chaos import ROLES
from example_runs import by_clerk, copied
from rooms.training.rsa_runs import CANDIDATES, command, directory
from small_run import rows, run_to_end, running

from cartridge_forge.learning.checkpoint import read_checkpoint
from cartridge_forge.plugins.environments.episode_files import from_row
from cartridge_forge.protocols.files import read_rows

OF_RSA = [role.name for role in ROLES if role.of_rsa]


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


pytestmark = [pytest.mark.timeout(900)]  # a busy machine starts it slowly

FAULTY = """\
import os, sys, time

def faulty(prompt, completion, number):
    print("to nobody")
    if number == 0:
        raise KeyError("gone")
    if number == 1:
        time.sleep(60)
    if number == 2:
        sys.exit(5)
    if number == 3:
        os._exit(9)
    if number == 4:
        return None
    return len(completion)
"""


def test_a_faulty_function_costs_its_episodes_alone_and_rows_may_not_change(
    tmp_path: Path,
) -> None:
    mesh = copied("gsm8k_like", tmp_path / "example")
    (mesh.parent / "mine.py").write_text(FAULTY)
    problems = mesh.parent / "problems.jsonl"
    page = "a page that is longer than the cartridge, for it has some more words than this " * 2
    problems.write_text(
        "".join(
            json.dumps({"question": f"problem {i}", "target": "1", "page": page, "number": i % 8})
            + "\n"
            for i in range(16)
        )
    )
    sets = {
        "reward": [{"python": "mine:faulty", "timeout_s": 1.0, "folder": str(mesh.parent)}],
        "episodes.tasks": 12,
        "episodes.group": 2, "train.steps": 2, "train.checkpoint_every": 1,
    }  # fmt: skip
    process = run_to_end(by_clerk(mesh, tmp_path, **sets))
    assert process.returncode == 0, process.stdout + process.stderr
    run = (tmp_path / "gsm8k_like" / "latest").resolve()
    whys = {
        0: "mine.py:6: KeyError: 'gone'", 1: "mine.py:8: took longer than 1 s",
        2: "mine.py:10: called sys.exit(5)", 3: "its process ended with 9", 4: "gave None",
    }  # fmt: skip
    met = set()
    for episode in read_rows(run / "episodes.jsonl"):
        number, outcome = (
            episode["task"]["arguments"]["row"]["number"],
            episode["rewards"]["faulty"],
        )
        met.add(number)
        assert outcome["why"] == whys.get(number, "")
        assert outcome["failed"] == (number in (0, 1, 2, 3))
        kind = "reward_left_out" if number == 4 else "reward_failed"
        assert episode["error_kind"] == (kind if number in whys else "")
        assert (episode["reward"] is None) == (number in whys)
    assert met == set(range(8))
    for row in rows(run / "metrics.jsonl"):
        counts = row["episodes"]
        failed = counts["reward/faulty/failed"] + counts["reward/faulty/left_out"]
        assert counts["errored"] == failed > 0

    # The same rows resume; others do not.
    problems.write_text(problems.read_text().replace("problem 7", "problem seven"))
    again = run_to_end(by_clerk(mesh, tmp_path, "--resume", **sets))
    assert again.returncode == 2
    assert "changed since the run began" in again.stdout + again.stderr
