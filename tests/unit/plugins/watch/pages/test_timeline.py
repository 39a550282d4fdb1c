"""The stages of a run, by what it recorded: which are over, and how long the others may take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from recorded_run import at, finish, recorded_run, train

from cartridge_forge.plugins.watch.pages.run_page import overview, probe_interval
from cartridge_forge.plugins.watch.pages.run_view import RunView
from cartridge_forge.plugins.watch.pages.timeline import RunStage, stages
from cartridge_forge.protocols.spec.loading import load_resolved
from cartridge_forge.services.run_directory import RunDirectory

STATUS: dict[str, Any] = {"arm": "on_policy", "steps": 4, "seconds_left": None}


def found(run: RunDirectory, *, running: bool, done: int, offline: int = 0) -> list[RunStage]:
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    learn = load_resolved(run.spec).learn
    return stages(learn, events, {"on_policy": done}, running=running, offline_steps=offline)


def test_a_run_in_training(tmp_path: Path) -> None:
    # Ready after 10 s; two of four steps of 4 s each, and no evaluation was timed yet.
    assert found(recorded_run(tmp_path), running=True, done=2) == [
        RunStage("start", "done", 10.0, 0.0),
        RunStage("train on policy", "now", 16.0, 8.0, 2, 4),
        RunStage("evaluate on policy", "later", None, None),
        RunStage("evaluate none", "later", None, None),
    ]


def test_a_run_that_was_killed_left_its_later_stages_out(tmp_path: Path) -> None:
    states = [stage.state for stage in found(recorded_run(tmp_path), running=False, done=2)]
    assert states == ["done", "left out", "left out", "left out"]


def test_an_evaluation_takes_what_the_one_before_took(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    train(run, 3)
    train(run, 4)
    run.append_event("usable", now=at(26))
    run.append_event("evaluated", now=at(31), arm="on_policy", accuracy=1.0)
    assert found(run, running=True, done=4)[2:] == [
        RunStage("evaluate on policy", "done", 5.0, 0.0),
        RunStage("evaluate none", "now", 5.0, 5.0),
    ]


def test_a_run_that_finished(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    finish(run)
    assert found(run, running=False, done=4) == [
        RunStage("start", "done", 10.0, 0.0),
        RunStage("train on policy", "done", 16.0, 0.0, 4, 4),
        RunStage("evaluate on policy", "done", 5.0, 0.0),
        RunStage("evaluate none", "done", 5.0, 0.0),
    ]


def test_the_untrained_cartridges_answer_once_the_offline_text_is_written(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, sets=("evaluate.arms=[untrained, on_policy, offline]",))
    train(run, 3)
    train(run, 4)
    run.append_event("usable", now=at(26))
    run.append_event("evaluated", now=at(31), arm="on_policy", accuracy=1.0)
    assert [(s.name, s.state) for s in found(run, running=True, done=4, offline=4)[3:5]] == [
        ("write offline text", "now"), ("evaluate untrained", "later"),
    ]  # fmt: skip
    run.append_event("checkpoint", now=at(40), arm="offline", step=0)
    run.append_event("evaluated", now=at(43), arm="untrained", accuracy=0.0)
    assert found(run, running=True, done=4, offline=4)[3:] == [
        RunStage("write offline text", "done", 9.0, 0.0),
        RunStage("evaluate untrained", "done", 3.0, 0.0),
        RunStage("train offline", "now", 12.0, 12.0, 0, 4),  # rollouts, of 1 s, are over
        RunStage("evaluate offline", "later", 4.0, 4.0),  # the mean of 5 and 3 s
    ]


def test_a_resumed_run_counts_from_its_last_start(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    run.append_event("run_started", now=at(1000), resumed=True)
    run.append_event("role_ready", now=at(1003), role="generator")
    shown = found(run, running=True, done=1)  # it was cut back to its checkpoint
    assert shown[0] == RunStage("start", "done", 3.0, 0.0)
    assert shown[1] == RunStage("train on policy", "now", 12.0, 12.0, 1, 4)


def test_the_time_left_is_of_the_whole_run(tmp_path: Path) -> None:
    view = RunView("tiny/r", recorded_run(tmp_path).path)
    shown = overview(view, STATUS)
    assert (shown["outcome"], shown["usable_in"], shown["seconds_left"]) == ("running", 8.0, None)
    assert overview(view, {**STATUS, "seconds_left": 31.0})["seconds_left"] == 31.0
    assert overview(view, None)["outcome"] == "unfinished"


@pytest.mark.parametrize(
    ("accuracy", "questions", "ci95"),
    [
        (0.5, 10, [0.2366, 0.7634]),  # `wilson_interval(5, 10)`
        (0.0, 10, [0.0, 0.2775]),
        (0.55, 10, None),  # no share of ten questions
        (0.5, 0, None),
    ],
)
def test_the_interval_of_a_validation(
    accuracy: float, questions: int, ci95: list[float] | None
) -> None:
    shown = probe_interval(accuracy, questions)
    assert shown == (None if ci95 is None else pytest.approx(ci95, abs=1e-4))
