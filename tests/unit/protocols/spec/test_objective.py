"""Rules of the objective: where hints come from, and what their writer needs."""

from pathlib import Path

import pytest

from protocols.errors import SpecError
from protocols.spec.learn import LearnSpec
from protocols.spec.loading import load_spec

MESH = str(Path(__file__).resolve().parents[4] / "meshes" / "three_channels.yaml")
MODEL = "objective.sdpo.hints=model"
BY_OPUS = (MODEL, "objective.sdpo.hint_writer=opus")


def learn(*sets: str) -> LearnSpec:
    return load_spec(MESH, sets=sets).spec.learn


def test_hints_are_of_templates_unless_told() -> None:
    sdpo = learn().objective.sdpo
    assert (sdpo.hints, sdpo.hint_writer, sdpo.asks) == ("template", "generator", None)
    assert learn(MODEL).objective.sdpo.asks is None
    assert learn(*BY_OPUS).objective.sdpo.asks == "opus"
    assert learn(*BY_OPUS, "objective.beta=0").replay is not None


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("objective.sdpo.hint_writer=opus",), "belongs to hints model alone"),
        ((MODEL, "objective.sdpo.hint_writer=nobody"),
         r"must be generator or one of replay.teachers \(opus, gpt, open\)"),
        (("objective.beta=0",), "beta must be > 0 with the section replay"),
        ((*BY_OPUS, "objective.beta=0", "objective.alpha=0"), "beta must be > 0"),
        ((*BY_OPUS, "objective.beta=0", "replay=null"), "beta must be > 0"),
        ((MODEL, "objective.beta=0"), "beta must be > 0"),
    ],
)  # fmt: skip
def test_a_writer_must_be_there(sets: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        learn(*sets)


def test_the_document_teacher_may_play_episodes() -> None:
    arms = "evaluate.arms=[document, untrained, offline, on_policy]"
    found = learn(arms, "train.warm_start={steps: 3}")
    assert "offline" in found.evaluate.arms
    assert found.train.warm_start is not None


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("objective.w_doc=0", "evaluate.arms=[offline, on_policy]"),
         "arms must not hold offline without objective.w_doc"),
        (("objective.w_doc=0", "train.warm_start={steps: 3}"), "with objective.w_doc above 0"),
        (("train.warm_start={steps: 41}",), r"must be <= train.steps \(40\)"),
    ],
)  # fmt: skip
def test_a_teachers_text_is_trained_by_doc_kl_alone(sets: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        learn(*sets)
