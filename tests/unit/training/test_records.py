"""Test the records of a step, a recipe's part of them, and resuming."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cartridge_forge.plugins.chat.rollouts import drawn_steps
from cartridge_forge.protocols.errors import CheckpointError, RunError
from cartridge_forge.protocols.files import read_rows
from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.protocols.records.status import RunStatus
from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef, Sampling
from cartridge_forge.services.clients import Replied
from cartridge_forge.services.run_directory import ResumePoint, RunDirectory
from cartridge_forge.training.controller import ControllerActor
from cartridge_forge.training.loop import OverlappedValidation, RunState
from cartridge_forge.training.records import counted
from cartridge_forge.training.training_run import TrainingRun


async def in_two_replies(
    requests: Sequence[GenerateRequest], replied: Replied = None, /, *, whole: bool = False
) -> list[Completion]:
    made = [Completion(r.id, (2,), (0.0,), (1,), "stop") for r in requests]
    assert replied is not None
    replied(made[:2])
    replied(made[2:])
    return made


def test_answers_are_counted_as_they_come() -> None:
    asked = [
        GenerateRequest(f"e/{i}", (4,), PrefixRef("document/a", 0), Sampling(), i) for i in range(3)
    ]
    told: list[tuple[int, int]] = []
    heard: list[str] = []

    def listens(completions: Sequence[Completion]) -> None:
        heard.extend(one.request_id for one in completions)

    generate = counted(in_two_replies, lambda done, whole: told.append((done, whole)))
    made = asyncio.run(generate(asked, listens))
    assert told == [(2, 3), (3, 3)]
    assert heard == [one.request_id for one in made] == ["e/0", "e/1", "e/2"]


LOST = "generator-1: NodeLost: its node is silent; delete the Node"


def controller(*lacking: str) -> Any:
    """One whose mesh is open, without a process of its own."""
    found: Any = object.__new__(ControllerActor)
    found._mesh = SimpleNamespace(pools={}, service=SimpleNamespace(lacking=lambda: lacking))
    found._status = RunStatus(message="paused")
    return found


def test_the_status_says_why_a_host_is_not_there() -> None:
    assert controller(LOST)._whole_status().message == f"paused; {LOST}"
    assert controller()._whole_status().message == "paused"


def test_a_failure_says_so_too() -> None:
    error = RunError("doc_teacher.score found no replica within 120 s")
    assert str(controller(LOST)._failure(error)) == f"{error}; {LOST}"
    assert controller()._failure(error) is error


@pytest.mark.parametrize(
    ("names", "each", "steps", "expected"),
    [
        ("ab", 2, 7, {"a": 7, "b": 7}),
        ("ab", 5, 3, {"a": 3, "b": 3}),
        # a, b, c, a, ...
        ("abc", 1, 7, {"a": 3, "b": 2, "c": 2}),
        # (a b) (c a) (b c) (a b)
        ("abc", 2, 4, {"a": 3, "b": 3, "c": 2}),
        ("abcd", 1, 2, {"a": 1, "b": 1, "c": 0, "d": 0}),
    ],
)
def test_steps_of_names_that_take_turns(
    names: str, each: int, steps: int, expected: dict[str, int]
) -> None:
    assert drawn_steps(names, each, steps) == expected


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
