"""A run whose directory fails it ends soon, says why and what is kept, and can be resumed."""

from __future__ import annotations

import json
import os
import shutil
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
    whole_and_resumed,
)

from forge_run.commands.control_client import ControlClient, ControlTarget
from services.control.endpoints import read_endpoints

LIMIT_SECONDS = 120.0
# A process that is held is not taken for dead.
PATIENT = {"heartbeat_s": 0.5, "suspect_after_s": 60.0, "dead_after_s": 90.0}
LONG: dict[str, Any] = {"train.steps": 1000, "evaluate.arms": ["on_policy"]}


def test_a_file_that_takes_no_more_ends_the_run(tmp_path: Path, finished: Finished) -> None:
    """As a full disk does, without root: every write to /dev/full fails with ENOSPC."""
    with running(command(tmp_path), tmp_path) as run:
        path = run.wait_for("on_policy", 2)
        (tmp_path / "full").symlink_to("/dev/full")
        shutil.copy(path / "metrics.jsonl", tmp_path / "kept")
        os.replace(tmp_path / "full", path / "metrics.jsonl")
        said = end_of(run)
    assert f"error: no room on the disk of {path}: No space left on device" in said
    assert "kept: checkpoint version-00000" in said
    os.replace(tmp_path / "kept", path / "metrics.jsonl")
    whole_and_resumed(tmp_path, finished.path)


def test_a_directory_that_is_removed_ends_the_run_and_is_not_made_again(tmp_path: Path) -> None:
    with running(command(tmp_path, **LONG), tmp_path) as run:
        path = run.wait_for("on_policy", 2)
        path.rename(tmp_path / "elsewhere")
        said = end_of(run)
    assert f"the run directory {path} was removed or moved" in said
    assert not path.exists()
    assert rows(tmp_path / "elsewhere" / "metrics.jsonl")


def test_one_run_is_not_resumed_twice_at_once(tmp_path: Path, finished: Finished) -> None:
    with running(command(tmp_path), tmp_path) as run:
        path = run.wait_for("on_policy", 2)
        second = run_to_end(command(tmp_path, "--resume"))
        assert second.returncode == 1
        assert f"run {path.name} is held by process {run.process.pid} on " in second.stderr
        said, _ = run.process.communicate(timeout=LIMIT_SECONDS)
        assert run.process.returncode == 0, said
    same_outcome(path, finished.path)


def test_a_dead_controller_is_noticed_and_torn_files_heal(
    tmp_path: Path, finished: Finished
) -> None:
    with running(command(tmp_path), tmp_path) as run:
        path = run.wait_for("on_policy", 5)
        (pid,) = [e["pid"] for e in rows(path / "events.jsonl") if e["event"] == "run_started"]
        os.kill(pid, signal.SIGKILL)
        said = end_of(run)
    assert f"the controller died; go on with --resume {path.name}" in said
    events = (path / "events.jsonl").read_bytes().splitlines(keepends=True)
    events[2:2] = [b'{"time": "2026-11-2\n']  # of a full disk that had room again
    (path / "events.jsonl").write_bytes(b"".join(events) + b'{"time')
    newest = max((path / "checkpoints").glob("version-*"))
    part = next(newest.glob("cartridge-*"))
    part.write_bytes(part.read_bytes()[:-1])
    (path / "checkpoints" / "run-state.json").unlink()  # else it goes on at its last state
    process = run_to_end(command(tmp_path, "--resume"))
    assert process.returncode == 0, process.stdout + process.stderr
    told = " ".join(process.stdout.split())
    assert "events.jsonl: removed a torn last line" in told
    assert "events.jsonl: removed damaged lines (3)" in told
    assert f"checkpoint {newest} is damaged: {part.name} does not match its checksum" in told
    assert f"set aside as damaged-{newest.name}" in told
    assert "going on from version-000002" in told
    same_outcome(path, finished.path)


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
    done = json.loads((path / "checkpoints" / "run-state.json").read_text())["version"]
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
