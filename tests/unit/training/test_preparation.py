"""Test what is shown of the preparation of cartridges: a stage, the time left, and events."""

from __future__ import annotations

from typing import Any

import pytest
from rooms.training.rsa_runs import learn

from cartridge_forge.plugins.watch.notices import PreparationProgress, step_warnings
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.step import (
    NOT_BEGUN,
    Preparation,
    TrainStepOutput,
    advance_preparation,
    preparation,
    set_preparation,
    work_done,
)
from cartridge_forge.training.controller import STARTING


def test_the_share_of_a_cartridge_counts_while_one_is_in_progress() -> None:
    work = work_done()
    set_preparation(1, 2)
    advance_preparation(0.25)
    assert preparation() == Preparation(1.25, 2)
    assert preparation().share == 0.625
    set_preparation(2, 2)
    advance_preparation(0.25)  # of something else
    assert preparation() == Preparation(2, 2)
    assert work_done() - work == 2  # a start that does so is alive
    set_preparation(0, 0)
    assert preparation() == NOT_BEGUN


def test_each_cartridge_is_an_event_and_the_time_left_is_that_of_the_rate_so_far() -> None:
    """Four cartridges of 80 s each, looked at every 40 s from the first half on."""
    progress = PreparationProgress()
    assert not progress.moved(NOT_BEGUN, 0.0)
    shown = []
    for period in range(9):
        for later in (0.0, 3.0, 6.0):  # of which one has news
            if progress.moved(Preparation(period / 2, 4), 40.0 * period + later):
                shown.append((progress.stage, progress.phase, progress.is_event))
    assert shown == [
        ("preparing cartridges, 0 of 4 done", "", True),
        ("preparing cartridges, 0 of 4 done", "about 5 min left", False),  # 3.5 of 80 s: 280 s
        ("preparing cartridges, 1 of 4 done", "about 4 min left", True),
        ("preparing cartridges, 1 of 4 done", "about 3 min left", False),
        ("preparing cartridges, 2 of 4 done", "about 3 min left", True),
        ("preparing cartridges, 2 of 4 done", "about 2 min left", False),
        ("preparing cartridges, 3 of 4 done", "about 80 s left", True),
        ("preparing cartridges, 3 of 4 done", "about 40 s left", False),
        (STARTING, "", True),
    ]
    assert (progress.cartridges, progress.total, progress.seconds_left) == (4, 4, 0.0)


def test_the_layers_of_a_cartridge_add_up_to_it() -> None:
    progress = PreparationProgress()
    assert not progress.moved(Preparation(0, 2), 0.0)
    assert progress.moved(Preparation(sum([1 / 30] * 30), 2), 30.0)  # 0.9999999999999998 or so
    assert progress.cartridges == 1


def test_the_time_left_is_told_once_a_quarter_of_a_cartridge_is_done() -> None:
    """Most of 60 s were spent on reading: 10% are done, and what is left takes no 19 min."""
    progress = PreparationProgress()
    assert not progress.moved(Preparation(0, 2), 0.0)
    assert progress.moved(Preparation(0.1, 2), 60.0)
    assert (progress.seconds_left, progress.phase) == (None, "")
    assert progress.moved(Preparation(0.25, 2), 70.0)
    assert progress.seconds_left == 490.0  # 1.75 / 0.25 * 70


def test_cartridges_that_were_prepared_at_once_are_not_shown() -> None:
    progress = PreparationProgress()
    assert not progress.moved(Preparation(4, 4), 0.5)
    assert not progress.moved(Preparation(4, 4), 9.0)
    quick = PreparationProgress()
    assert not quick.moved(Preparation(0, 4), 0.5)
    assert not quick.moved(Preparation(3, 4), 1.5)
    assert not quick.moved(Preparation(4, 4), 9.0), "a start that nobody saw begin has no end"


def spec(**sets: Any) -> LearnSpec:
    plain: dict[str, Any] = learn().model_dump(exclude_defaults=True)
    for name, value in sets.items():
        section, _, key = name.partition("__")
        plain.setdefault(section, {})[key] = value
    return type(learn()).model_validate(plain)


def warnings(learned: LearnSpec, **facts: float) -> dict[str, str]:
    return step_warnings(learned, TrainStepOutput(0.0, terms={"doc_kl": facts}))


def test_most_tokens_behind_a_mistake() -> None:
    assert warnings(spec(), after_refusal=0.5) == {}
    told = warnings(spec(), after_refusal=0.74)
    assert set(told) == {"after_refusal"}
    text = told["after_refusal"]
    assert text.startswith("74% of the trained tokens lie behind a token that the student wrote")
    assert "less than 0.05" in text
    assert "set rollout.verify: {rule: threshold}" in text
    assert warnings(spec(rollout__until_refused=0.01), after_refusal=0.74) == {}


@pytest.mark.parametrize("mass", [0.9, 1.0])
def test_a_student_that_is_seen_is_not_warned_of(mass: float) -> None:
    assert warnings(spec(), student_mass=mass) == {}


def test_a_divergence_that_misses_the_student() -> None:
    told = warnings(spec(teacher__top_k=7), student_mass=0.68, after_refusal=0.1)
    assert set(told) == {"student_mass"}
    assert told["student_mass"].startswith(
        "the loss sees 68% of the student's probability in the teacher's top 7 (teacher.top_k)"
    )
    assert "below 90%" in told["student_mass"]


def test_a_step_without_document_distillation() -> None:
    assert step_warnings(spec(), TrainStepOutput(0.0, terms={"grpo": {"value": 1.0}})) == {}
