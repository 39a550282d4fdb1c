"""A run that ends before its work does is gone on with where it was, and as it was scaled."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from small_run import (
    Finished,
    command,
    end_of,
    rows,
    run_to_end,
    running,
    same_outcome,
)

from cartridge_forge.plugins.watch.commands.control_client import ControlClient, ControlTarget
from cartridge_forge.plugins.watch.control.endpoints import read_endpoints

LIMIT_SECONDS = 120.0
# A process that is held is not taken for dead.
PATIENT = {"heartbeat_s": 0.5, "suspect_after_s": 60.0, "dead_after_s": 90.0}


def told(path: Path, event: str) -> list[dict[str, Any]]:
    return [e for e in rows(path / "events.jsonl") if e["event"] == event]


def test_a_step_that_outlasts_its_grace_is_the_one_gone_on_with(
    tmp_path: Path, finished: Finished
) -> None:
    sets: dict[str, Any] = {"train__checkpoint_every": 0, "health": PATIENT}
    with running(command(tmp_path, "--grace", "1", **sets), tmp_path) as run:
        path = run.wait_for("on_policy", 2)
        while not any(e["step"] >= 3 for e in told(path, "step")):  # its row waits for a validation
            assert run.process.poll() is None
        [pid] = [e["pids"][0] for e in told(path, "role_ready") if e["role"] == "doc_teacher"]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(5.0)  # one that was scored already ends; the next waits for ever
        run.process.send_signal(signal.SIGTERM)
        said, _ = run.process.communicate(timeout=LIMIT_SECONDS)
        assert run.process.returncode == 143, said
        run.wait_until_gone(LIMIT_SECONDS)
    assert list((path / "checkpoints").glob("version-*")) == []
    state = (path / "checkpoints" / "run-state.json").read_text()
    done = json.loads(state.splitlines()[0])["version"]
    assert done >= 3
    on = f"after step {done} of on_policy, from the trainer's last state"
    assert f"--resume {path.name} goes on {on}" in " ".join(said.split())
    process = run_to_end(command(tmp_path, "--resume", **sets))
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"going on {on}" in " ".join(process.stdout.split())
    trained = [e["step"] for e in told(path, "step")]
    assert trained[: done + 1] == list(range(1, done + 2)), "no step was trained again"
    same_outcome(path, finished.path)


def test_sizes_that_were_set_by_command_outlive_the_controller(tmp_path: Path) -> None:
    sets: dict[str, Any] = {"evaluate__arms": ["on_policy"]}
    with running(command(tmp_path, **sets), tmp_path) as run:
        path = run.wait_for("on_policy", 1)
        with ControlClient(ControlTarget(read_endpoints(path).control, path)) as client:
            client.scale("generator", 3)
            client.scale("doc_teacher", 2)
            client.scale("doc_teacher", 1)
        [started] = told(path, "run_started")
        os.kill(started["pid"], signal.SIGKILL)
        end_of(run)
    [at, *_] = [e["time"] for e in told(path, "scaled") if e["role"] == "generator"]
    process = run_to_end(command(tmp_path, "--resume", "unfinished", **sets))
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"generator: 3 replicas, as scaled at {at}" in " ".join(process.stdout.split())
    ready = [(e["role"], e["replicas"]) for e in told(path, "role_ready")]
    assert [n for role, n in ready if role == "generator"] == [2, 3]
    assert [n for role, n in ready if role == "doc_teacher"] == [1, 1]


def test_one_run_is_not_resumed_twice_at_once(tmp_path: Path, finished: Finished) -> None:
    with running(command(tmp_path), tmp_path) as run:
        path = run.wait_for("on_policy", 2)
        second = run_to_end(command(tmp_path, "--resume"))
        assert second.returncode == 1
        assert f"run {path.name} is held by process {run.process.pid} on " in second.stderr
        said, _ = run.process.communicate(timeout=LIMIT_SECONDS)
        assert run.process.returncode == 0, said
    same_outcome(path, finished.path)
