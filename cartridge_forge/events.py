"""Define the events of a run as typed records, and read them from its files as they grow.

metrics.jsonl  a row per step   -> StepTrained
events.jsonl   all else         -> RunBegan, CheckpointSaved, CartridgesUsable, ArmMeasured,
                                   RunWarning, RunEnded, or RunEvent for one of another name
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunEvent:
    """Hold one event of a run: its name in events.jsonl (`step` for a step's metrics), and all of
    its fields."""

    name: str
    fields: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class RunBegan(RunEvent):
    """Tell that the run has a directory: `run`. `resumed` is true for one that goes on."""

    run: Path
    resumed: bool


@dataclass(frozen=True)
class StepTrained(RunEvent):
    """Tell a step of an arm: its number out of `steps`, the mean doc_kl per token in nats (None
    without document distillation), the tokens trained, and the accuracy where it was validated."""

    arm: str
    step: int
    kl: float | None
    tokens: int
    accuracy: float | None


@dataclass(frozen=True)
class CheckpointSaved(RunEvent):
    """Tell a checkpoint of an arm, by its name under the run's checkpoints/."""

    arm: str
    step: int
    checkpoint: str


@dataclass(frozen=True)
class CartridgesUsable(RunEvent):
    """Tell that the trained cartridges can be asked and saved; what follows measures them."""

    version: int
    cartridges: tuple[str, ...]


@dataclass(frozen=True)
class ArmMeasured(RunEvent):
    """Tell an arm's greedy accuracy on `n` held-out questions, with its 95% interval."""

    arm: str
    accuracy: float
    ci95: tuple[float, float]
    n: int


@dataclass(frozen=True)
class RunWarning(RunEvent):
    """Tell of what is allowed and probably not meant: a setting, or a step without rewards."""

    message: str


@dataclass(frozen=True)
class RunEnded(RunEvent):
    """Tell how the run ended: finished, or stopped with a checkpoint."""

    status: str


def event_of(row: Mapping[str, Any], run: Path) -> RunEvent | None:
    """Return the event of a row of events.jsonl; None for `step`, which metrics.jsonl tells."""
    name = row["event"]
    match name:
        case "step":
            return None
        case "run_started":
            return RunBegan(name, row, run, bool(row["resumed"]))
        case "checkpoint":
            return CheckpointSaved(name, row, row["arm"], row["step"], row["path"])
        case "usable":
            return CartridgesUsable(name, row, row["version"], tuple(row["cartridges"]))
        case "evaluated":
            low, high = row["ci95"]
            return ArmMeasured(name, row, row["arm"], row["accuracy"], (low, high), row["n"])
        case "warned":
            return RunWarning(name, row, row["message"])
        case "finished":
            return RunEnded(name, row, row["status"])
    return RunEvent(name, row)


def step_of(row: Mapping[str, Any]) -> StepTrained:
    """Return the event of a row of metrics.jsonl."""
    return StepTrained(
        "step", row, row["arm"], row["step"], row["kl"], row["tokens"], row["accuracy"]
    )


class RunFollower:
    """Read the events of a run's directory that came since the last look. `from_start` begins with
    the run's first event, else with what comes from now on."""

    def __init__(self, run: Path, *, from_start: bool = True) -> None:
        self._run = run
        files = ("metrics.jsonl", "events.jsonl")
        self._places = {name: 0 if from_start else _size(run / name) for name in files}

    def new(self) -> list[RunEvent]:
        """Return the events since the last call; those of a step come before what follows it."""
        steps = [step_of(row) for row in self._rows("metrics.jsonl")]
        events = [event_of(row, self._run) for row in self._rows("events.jsonl")]
        return [*steps, *(event for event in events if event is not None)]

    def _rows(self, name: str) -> list[dict[str, Any]]:
        path = self._run / name
        if not path.is_file():
            return []
        # A resumed run cuts its files back to its checkpoint, and then appends.
        offset = min(self._places[name], _size(path))
        with path.open("rb") as file:
            file.seek(offset)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._places[name] = offset + len(complete) + len(newline)
        return [json.loads(line) for line in complete.splitlines() if line]


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
