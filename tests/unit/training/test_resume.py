"""What a resumed run takes: the trainer's last state or a checkpoint, and a row that waited."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cartridge_forge.protocols.errors import CheckpointError
from cartridge_forge.protocols.files import read_rows
from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.services.run_directory import RunDirectory
from cartridge_forge.services.run_position import ResumePoint
from cartridge_forge.training.loop import OverlappedValidation, RunState
from cartridge_forge.training.training_run import TrainingRun


def row(step: int) -> MetricRow:
    return MetricRow(
        arm="on_policy", step=step, version=step, kl=0.1, grad_norm=1.0, lr=0.1, tokens=5,
        stale_tokens=0, cartridges={"a": {"lr": 0.1}},
    )  # fmt: skip


class Trainer:
    """One whose last state may be damaged."""

    def __init__(self, damaged: bool) -> None:
        self.damaged, self.calls = damaged, list[str]()

    async def take_last_state(self) -> int:
        self.calls.append("last state")
        if self.damaged:
            raise CheckpointError("it does not match its checksum")
        return 3

    async def restore(self, path: str) -> dict[str, Any]:
        self.calls.append(path)
        return asdict(RunState(step=2))


def resumed(path: Path, point: ResumePoint, *, rows: int, damaged: bool = False) -> Any:
    """A run that went on, after `rows` rows of metrics."""
    directory = RunDirectory.create(path, "tiny", "spec")
    for step in range(1, rows + 1):
        directory.append_metric(row(step))

    async def measure(version: int) -> float:
        return version / 10

    run: Any = object.__new__(TrainingRun)
    run._directory, run._trainer, run._state = directory, Trainer(damaged), RunState()
    run._recipe = SimpleNamespace(restore=lambda saved: None)
    run._validation = OverlappedValidation(measure, directory.append_metric)
    run._recorder = SimpleNamespace(event=lambda name, **facts: None)
    run._show = lambda **changes: None
    run._resumed = run._recovered = run._begun_arm = False
    asyncio.run(run.resume(point))
    return run


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_a_row_that_waited_for_its_validation_is_written_once(tmp_path: Path, rows: int) -> None:
    state = asdict(RunState(step=3, held=asdict(row(3))))
    run = resumed(tmp_path, ResumePoint(Path("version-000002"), state), rows=rows)
    assert run._trainer.calls == ["last state"]
    assert (run._state, run._recovered) == (RunState(step=3), True)
    asyncio.run(run._validation.settled())
    found = read_rows(run._directory.metrics)
    assert [(r["step"], r["accuracy"]) for r in found] == [
        (1, None), (2, None), (3, 0.3 if rows == 2 else None),
    ]  # fmt: skip
    if rows == 2:
        assert found[2] == {**found[1], "step": 3, "version": 3, "accuracy": 0.3}


def test_a_damaged_last_state_leaves_the_checkpoint(tmp_path: Path) -> None:
    point = ResumePoint(Path("version-000002"), asdict(RunState(step=3)))
    run = resumed(tmp_path, point, rows=3, damaged=True)
    assert run._trainer.calls == ["last state", "version-000002"]
    assert (run._state.step, run._resumed, run._recovered) == (2, True, False)
    assert [r["step"] for r in read_rows(run._directory.metrics)] == [1, 2]


def test_a_damaged_last_state_and_no_checkpoint_start_again(tmp_path: Path) -> None:
    point = ResumePoint(None, asdict(RunState(step=3)))
    run = resumed(tmp_path, point, rows=3, damaged=True)
    assert (run._state, run._resumed) == (RunState(), False)
    assert read_rows(run._directory.metrics) == []
