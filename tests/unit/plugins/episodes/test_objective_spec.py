"""Rules of the objective: which keys of grpo go together, and what the writer of hints needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective
from cartridge_forge.plugins.episodes.spec.policy_gradient import GrpoSpec, MismatchSpec
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.spec.loading import load_spec

MESH = str(Path(__file__).resolve().parents[4] / "meshes" / "three_channels.yaml")
MODEL = "objective.sdpo.hints=model"
BY_OPUS = (MODEL, "objective.sdpo.hint_writer=opus")
BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"old": "sampler"},
        "must be null with old sampler, whose ratio has the sampler's deviation in it; "
        "set it to null, or old to trainer",
    ),
    (
        {"baseline": "reinforce_pp"},
        "must be keep with baseline reinforce_pp, which compares with all groups; set it to keep",
    ),
    (
        {"zero_variance": "keep", "refill": 2},
        "must be 0 with zero_variance keep, which drops none; set it to 0",
    ),
    ({"overlong": "shape"}, "must be given with overlong shape; set it, or overlong to filter"),
    ({"overlong_buffer": 4}, "belongs to overlong shape alone; remove it"),
    ({"kl_reference": "version"}, "must be given with kl_reference version; set it to a count"),
    ({"kl_refresh": 4}, "belongs to kl_reference version alone; remove it"),
    ({"distill": 0.1}, "must be 0 with zero_variance drop"),
    ({"refill": 17}, "less than or equal to 16"),
    ({"old": "both"}, "Input should be 'trainer' or 'sampler'"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        GrpoSpec(**given)
    assert message in str(caught.value)


def test_what_goes_together() -> None:
    assert GrpoSpec().old == "trainer"
    assert GrpoSpec().mismatch == MismatchSpec()
    assert GrpoSpec(baseline="reinforce_pp", zero_variance="keep").refill == 0
    assert EpisodesObjective(w_rl=1.0, grpo=GrpoSpec(refill=3)).refills == 3
    assert EpisodesObjective(grpo=GrpoSpec(refill=3)).refills == 0  # there is no GRPO
    assert EpisodesObjective().reads_document
    assert not EpisodesObjective(w_doc=0.0, w_rl=1.0).reads_document
    by_document = GrpoSpec(kl=0.1, kl_reference="document")
    assert EpisodesObjective(w_doc=0.0, w_rl=1.0, grpo=by_document).reads_document
    assert by_document.terms_text == "; KL to the model with the document x 0.1"
    distilling = GrpoSpec(zero_variance="keep", distill=0.5)
    assert EpisodesObjective(w_doc=0.0, w_rl=1.0, grpo=distilling).reads_document
    assert distilling.terms_text == "; 0.5 a nat from the model with the document"
    assert GrpoSpec(old="sampler", mismatch=None).mismatch is None


def learn(*sets: str) -> LearnSpec:
    return load_spec(MESH, sets=sets).spec.learn


def test_hints_are_of_templates_unless_told() -> None:
    sdpo = learn().objective.sdpo
    assert (sdpo.hints, sdpo.hint_writer, sdpo.hint_teacher) == ("template", "generator", None)
    assert learn(MODEL).objective.sdpo.hint_teacher is None
    assert learn(*BY_OPUS).objective.sdpo.hint_teacher == "opus"
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
        (("objective.w_doc=0", "train.warm_start={steps: 3}"),
         "warm_start must be left out without objective.w_doc"),
    ],
)  # fmt: skip
def test_a_teachers_text_is_trained_by_doc_kl_alone(sets: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        learn(*sets)
