"""Where a run goes on: at the trainer's last state where rows and run are of its step too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.services.run_directory import RunDirectory
from cartridge_forge.services.run_position import (
    ResumePoint,
    newest_checkpoint,
    resume_point,
    write_run_state,
)

STATE = {"arm": "on_policy", "step": 5}
LAST = "after step 5 of on_policy, from the trainer's last state"
CHECKPOINT = "from version-000004, after step 4 of on_policy"


def last_state(run: RunDirectory, version: int) -> None:
    """Its manifest, as `learning.checkpoint` writes it."""
    run.last_state.mkdir(exist_ok=True)
    state = json.dumps({"facts": {"version": version}, "files": {}})
    (run.last_state / "manifest.json").write_text(json.dumps({"crc32": "0", "state": state}))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that was killed in step 6: it has a checkpoint of step 4 and the rows of 5 steps."""
    run = RunDirectory.create(tmp_path, "tiny", "spec")
    position = {"arm": "on_policy", "step": 4}
    path = run.checkpoints / "version-000004"
    path.mkdir()
    (path / "manifest.json").write_text(json.dumps({"facts": {"position": position}}))
    for step in range(1, 6):
        row = MetricRow(
            arm="on_policy", step=step, version=step, kl=0.1, grad_norm=1.0, lr=0.1, tokens=5,
            stale_tokens=0,
        )  # fmt: skip
        run.append_metric(row)
    write_run_state(run, STATE, 5)
    last_state(run, 5)
    return run


def test_a_run_goes_on_with_the_step_that_it_was_killed_in(run: RunDirectory) -> None:
    newest = newest_checkpoint(run)
    assert resume_point(run, newest) == ResumePoint(newest, STATE)
    assert str(resume_point(run, newest)) == LAST
    assert str(resume_point(run, None)) == LAST
    assert resume_point(run, newest, (0, 5)).state == STATE


@pytest.mark.parametrize("version", [4, 6])
def test_states_of_two_steps_are_not_put_together(run: RunDirectory, version: int) -> None:
    last_state(run, version)
    assert str(resume_point(run, newest_checkpoint(run))) == CHECKPOINT


@pytest.mark.parametrize("lost", ["rows", "state", "torn", "half", "trainer", "whole", "newer"])
def test_what_a_machine_lost_is_noticed(run: RunDirectory, lost: str) -> None:
    newest, whole = newest_checkpoint(run), None
    if lost == "rows":
        run.metrics.write_bytes(run.metrics.read_bytes()[:-1])
    elif lost == "state":
        run.run_state.unlink()
    elif lost == "torn":
        run.run_state.write_text(run.run_state.read_text()[:-2])
    elif lost == "half":  # a state of step 6 over half of that of step 5
        old = run.run_state.read_bytes()
        write_run_state(run, {**STATE, "step": 6}, 5)
        new = run.run_state.read_bytes()
        run.run_state.write_bytes(new[: len(new) // 2] + old[len(new) // 2 :])
        assert json.loads(run.run_state.read_text().splitlines()[0])["version"] == 5
    elif lost == "trainer":
        (run.last_state / "manifest.json").write_text("")
    elif lost == "whole":
        whole = (0, 4)
    else:
        newest = run.checkpoints / "version-000005"
    assert resume_point(run, newest, whole) == ResumePoint(newest)


def test_a_shorter_state_leaves_nothing_of_a_longer_one(run: RunDirectory) -> None:
    write_run_state(run, {**STATE, "more": "x" * 9000}, 5)
    assert resume_point(run, None).state == {**STATE, "more": "x" * 9000}
    write_run_state(run, STATE, 5)
    assert resume_point(run, None).state == STATE


def test_a_state_from_before_checksums_is_read(run: RunDirectory) -> None:
    run.run_state.write_text(run.run_state.read_text().splitlines()[0])
    assert resume_point(run, None).state == STATE


def test_without_either_a_run_starts_again(run: RunDirectory) -> None:
    run.run_state.unlink()
    assert str(resume_point(run, None)) == "from the start"
    (run.checkpoints / "version-000004" / "manifest.json").write_text("{")
    assert str(resume_point(run, newest_checkpoint(run))) == "from version-000004"
