"""What a run warns of after a step: mistakes that most tokens lie behind, and an unseen student."""

from __future__ import annotations

from typing import Any

import pytest
from rooms.training.longhealth_setup import learn

from cartridge_forge.plugins.watch.step_warnings import step_warnings
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.step import TrainStepOutput


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
