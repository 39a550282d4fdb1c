"""A run that is stopped, killed or damaged: what is kept, what is said, and how it goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
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
