"""Test runs that are interrupted, damaged, ended and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from finished_runs import compared
from s3_server import S3Server, require_moto, s3_server
from small_run import (
    STALE,
    Finished,
    command,
    end_of,
    latest,
    rows,
    run_to_end,
    running,
    same_outcome,
    whole_and_resumed,
)

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.plugins.watch.commands.control_client import ControlClient, ControlTarget
from cartridge_forge.plugins.watch.control.endpoints import read_endpoints

STOP_SECONDS = 120.0


def resume(root: Path, **sets: object) -> None:
    process = run_to_end(command(root, "--resume", **sets))
    assert process.returncode == 0, process.stdout + process.stderr


def killed(root: Path, arm: str, step: int) -> Path:
    """The directory of a run whose client is killed once that step is recorded."""
    with running(command(root), root) as run:
        path = run.wait_for(arm, step)
        run.process.kill()
        run.wait_until_gone(STOP_SECONDS)
    return path


@pytest.fixture(scope="module")
def cut_short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a run that was killed after its second checkpoint; its tests leave it so."""
    root = tmp_path_factory.mktemp("cut_short")
    killed(root, "on_policy", 5)
    return root


@pytest.mark.parametrize("arm", ["on_policy", "offline"])
def test_killed_and_resumed_equals_uninterrupted(
    arm: str, finished: Finished, cut_short: Path, tmp_path: Path
) -> None:
    """Which shows too that two runs of one seed are one, to the byte."""
    if arm == "on_policy":
        shutil.copytree(cut_short, tmp_path, symlinks=True, dirs_exist_ok=True)
        path = latest(tmp_path)
    else:
        path = killed(tmp_path, arm, 3)
    assert not (path / "results.json").exists()
    resume(tmp_path)
    assert latest(tmp_path) == path
    assert (path / "spec.yaml").read_bytes() == (finished.path / "spec.yaml").read_bytes()
    same_outcome(path, finished.path)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_stopped_by_a_signal(number: int, code: int, finished: Finished, tmp_path: Path) -> None:
    with running(command(tmp_path), tmp_path) as run:
        path = run.wait_for("on_policy", 2)
        os.killpg(run.process.pid, number)  # as a terminal does: the whole group
        said, _ = run.process.communicate(timeout=STOP_SECONDS)
        assert run.process.returncode == code, said
        run.wait_until_gone(STOP_SECONDS)
    results = json.loads((path / "results.json").read_text())
    assert results["status"] == "stopped"
    assert str(path) in said.replace("\n", "")
    steps = [r["step"] for r in rows(path / "metrics.jsonl")]
    newest = sorted((path / "checkpoints").glob("version-*"))[-1]
    assert newest.name == f"version-{steps[-1]:06d}", "the last step is in the checkpoint"
    if number == signal.SIGTERM:  # how a checkpoint came to be asked for is not in it
        resume(tmp_path)
        same_outcome(path, finished.path)


def test_stopped_with_rollouts_in_flight_and_resumed(stale: Finished, tmp_path: Path) -> None:
    """With staleness the next step's rollouts are under way: they are kept, not drawn again."""
    with running(command(tmp_path, **STALE), tmp_path) as run:
        path = run.wait_for("on_policy", 2)
        run.process.send_signal(signal.SIGTERM)
        run.process.communicate(timeout=STOP_SECONDS)
    newest = sorted((path / "checkpoints").glob("version-*"))[-1]
    position = json.loads((newest / "manifest.json").read_text())["facts"]["position"]
    assert position["pending"], "nothing was in flight: this test showed nothing"
    resume(tmp_path, **STALE)
    same_outcome(path, stale.path)


def test_a_killed_generator_of_which_none_may_die_ends_the_run_by_name(tmp_path: Path) -> None:
    # Without a probe, beside which the next step is trained before the row of this one is written.
    sets = {"roles.generator.restarts": 0, "evaluate.probe_every": 0}
    with running(command(tmp_path, **sets), tmp_path) as run:
        path = run.wait_for("on_policy", 3)
        ready = [e for e in rows(path / "events.jsonl") if e["event"] == "role_ready"]
        (pids,) = [e["pids"] for e in ready if e["role"] == "generator"]
        os.kill(pids[1], signal.SIGKILL)
        said, _ = run.process.communicate(timeout=STOP_SECONDS)
        run.wait_until_gone(STOP_SECONDS)
    assert run.process.returncode not in (0, 130, 143)
    message = "generator[1] died, and roles.generator.restarts (0) are used up; the last reason: "
    assert message in " ".join(said.split())
    (failed,) = [e for e in rows(path / "events.jsonl") if e["event"] == "failed"]
    assert failed["message"].startswith(message)
    assert json.loads((path / "results.json").read_text())["status"] == "failed"
    newest = sorted((path / "checkpoints").glob("version-*"))[-1]
    steps = [r["step"] for r in rows(path / "metrics.jsonl")]
    assert newest.name == f"version-{steps[-1]:06d}", "no step is lost that was recorded"


def test_another_spec_is_refused(cut_short: Path) -> None:
    process = run_to_end(command(cut_short, "--resume", train__lr=0.123, rollout__prompts=8))
    assert process.returncode == 2
    assert "differs in learn.rollout.prompts, learn.train.lr" in process.stderr


def fill(path: Path) -> None:
    """Take all room that a file system has."""
    with path.open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(2**12))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a file system; the test of a full file needs none")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_ends_the_run_with_its_last_checkpoint(
    small_disk: Path, finished: Finished
) -> None:
    with running(command(small_disk), small_disk) as run:
        path = run.wait_for("on_policy", 2)
        fill(small_disk / "filler")
        said = end_of(run)
    assert f"error: no room on the disk of {path}: No space left on device" in said
    newest = max(p.name for p in (path / "checkpoints").glob("version-*"))
    assert f"kept: checkpoint {newest}; make room, then go on with --resume {path.name}" in said
    steps = rows(path / "metrics.jsonl")
    assert newest == f"version-{len(steps):06d}", "the reserve had room for the last step's state"
    (small_disk / "filler").unlink()
    whole_and_resumed(small_disk, finished.path)


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


# A process that is held is not taken for dead.
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


URL = "s3://runs/of/ours"


KEPT: dict[str, Any] = {"records.store": URL}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    require_moto()
    with s3_server() as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        yield found


def test_a_server_that_dies_holds_up_no_training(
    tmp_path: Path, server: S3Server, finished: Finished
) -> None:
    with running(command(tmp_path, **KEPT), tmp_path) as run:
        path = run.wait_for("on_policy", 1)
        server.end()
        said, _ = run.process.communicate(timeout=400)
    told = " ".join(said.split())
    assert run.process.returncode == 1, said
    assert f"the run goes on in {path}" in told
    assert f"the run is whole in {path}; make the store reachable" in told
    same_outcome(path, finished.path)

    with s3_server(server.port):  # and empty: nothing of the run is there
        again = run_to_end(command(tmp_path, "--resume", **KEPT))
        assert again.returncode == 0, again.stdout + again.stderr
        same_outcome(path, finished.path)
        third = tmp_path / "third"
        assert forge(["pull", f"{URL}/longhealth/{path.name}", "--run-dir", str(third)]) == 0
        same_outcome(third / "longhealth" / path.name, finished.path)
        assert rows(path / "metrics.jsonl")


def test_the_same_seed_gives_the_same_answers(finished: Finished, tmp_path: Path) -> None:
    """Whatever they were batched with."""
    _, _, told = compared(finished, tmp_path, times=2)
    for again in told:
        for row in again["arms"]:
            del row["latency"], row["seconds"]
    assert told[0] == told[1]
