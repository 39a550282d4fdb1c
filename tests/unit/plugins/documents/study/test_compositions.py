"""Which cartridges stand beside a prompt's own in training, and where."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rooms.training.rsa_runs import learn, tasks

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.documents.study.longhealth import LongHealthPrompts
from cartridge_forge.plugins.documents.study.prompts import composition_choice, over_cartridges
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.spec.sections import ComposeSpec
from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef, Sampling
from cartridge_forge.training.records import (
    StudyPrompt,
    as_rollout,
    rollout_from,
)

MODEL = Path(__file__).resolve().parents[5] / "models" / "clinic-reader"
BIRDS = {
    "a": ["the heron fishes."], "b": ["a heron sleeps. a heron wakes.", "rust."],
    "c": ["iron and rust."], "d": ["an otter swims."], "e": ["a heron."],
}  # fmt: skip


def spec_of(distractors: int, share: float, **train: Any) -> LearnSpec:
    spec = learn(patients=5, prompts=10)
    compose = ComposeSpec(distractors=distractors, share=share)
    changed = spec.train.model_copy(update={"compose": compose, **train})
    model = spec.model.model_copy(update={"path": str(MODEL)})
    return spec.model_copy(update={"train": changed, "model": model})


def opened(distractors: int, share: float, **train: Any) -> LongHealthPrompts:
    return tasks(load_tokenizer(str(MODEL)), spec_of(distractors, share, **train))


def about(name: str, step: int, count: int) -> list[StudyPrompt]:
    document = PrefixRef(f"document/{name}", 0)
    requests = [
        GenerateRequest(f"on_policy/{step}/{i}", (4,), document, Sampling(), i)
        for i in range(count)
    ]
    return [StudyPrompt(name, "question", r, name, (name,), r.id) for r in requests]


def orders(spec: LearnSpec, text: str, steps: int = 60) -> list[tuple[str, ...]]:
    """The compositions of prompts about a with this text, of which each step has ten."""
    compose = composition_choice(spec, BIRDS)
    found = []
    for step in range(steps):
        found += [p.composed for p in compose(about("a", step, 10), [text] * 10)]
    return found


@pytest.mark.parametrize(("share", "expected"), [(1.0, 10), (0.5, 5), (0.24, 2), (0.01, 0)])
def test_a_share_of_every_step_is_composed(share: float, expected: int) -> None:
    run = opened(2, share)
    for step in range(8):
        for prompts in (run.rollout(step, 7), run.offline(step)):
            composed = [p for p in prompts if p.composed]
            assert len(composed) == expected
            for p in composed:
                assert p.cartridge in p.composed
                assert len({*p.composed}) == 3 == len(p.composed)


def test_the_student_reads_the_composition_in_one_version_and_the_teacher_the_document() -> None:
    run = opened(3, 0.5)
    for p in run.rollout(2, 7):
        names = p.composed or (p.cartridge,)
        assert p.request.prefix.parts == tuple(PrefixRef(f"cartridge/{n}", 7) for n in names)
    for p in run.offline(2):
        assert p.request.prefix == PrefixRef(f"document/{p.document}", 0)
        assert p.contexts == (p.document,)


def test_the_routers_choice_stands_beside_and_drawn_ones_where_it_has_none() -> None:
    """Of the others e is the better passage about herons, for it is shorter; then b. The rest share
    no word, and c and d are drawn."""
    one = Counter(orders(spec_of(1, 1.0), "a heron?"))
    assert one.keys() == {("a", "e"), ("e", "a")}
    assert all(abs(n - 300) < 49 for n in one.values()), "four standard deviations of 600 halves"
    three = Counter(orders(spec_of(3, 1.0), "heron"))
    assert {tuple(n for n in names if n != "a") for names in three} == {
        ("e", "b", "c"), ("e", "b", "d"),
    }  # fmt: skip
    places = Counter(names.index("a") for names in three.elements())
    assert all(abs(places[place] - 150) < 43 for place in range(4))
    drawn = Counter(names[1 - names.index("a")] for names in orders(spec_of(1, 1.0), "whale"))
    assert all(abs(drawn[name] - 150) < 43 for name in "bcde")


def test_draws_depend_on_the_seed_and_the_step_alone() -> None:
    spec = spec_of(2, 0.5)
    compose = composition_choice(spec, BIRDS)

    def drawn(of: LearnSpec, step: int) -> Sequence[StudyPrompt]:
        return composition_choice(of, BIRDS)(about("a", step, 10), ["whale"] * 10)

    assert [compose(about("a", s, 10), ["whale"] * 10) for s in (4, 2, 4)] == [
        drawn(spec, s) for s in (4, 2, 4)
    ]
    assert drawn(spec, 4) != drawn(spec, 2)
    assert drawn(spec, 4) != drawn(spec_of(2, 0.5, seed=1), 4)


def test_without_the_section_every_prompt_has_its_own_cartridge() -> None:
    prompts = about("a", 1, 3)
    assert composition_choice(learn(), BIRDS)(prompts, ["heron"] * 3) == prompts
    alone = [p.request.prefix for p in over_cartridges(prompts, 4)]
    assert alone == [PrefixRef("cartridge/a", 4)] * 3


def test_too_few_cartridges_and_too_long_compositions_are_refused() -> None:
    with pytest.raises(DataError, match="distractors is 5 and the run has 5 cartridges; lower it"):
        composition_choice(spec_of(5, 1.0), BIRDS)
    spec = spec_of(4, 1.0)
    long = spec.cartridge.model_copy(update={"tokens": 794})
    with pytest.raises(
        DataError,
        match=r"of 5 cartridges and a row take 4,098 tokens, and the model reads 4,096: lower",
    ):
        composition_choice(spec.model_copy(update={"cartridge": long}), BIRDS)


@pytest.mark.parametrize("offline", [False, True])
def test_a_rollout_keeps_its_compositions_through_a_checkpoint(offline: bool) -> None:
    run = opened(3, 0.5)
    prompts = run.offline(1) if offline else run.rollout(1, 2)
    done = [Completion(p.request.id, (9, 2), (-0.1, -0.2), (2, 2), "stop") for p in prompts]
    rollout = as_rollout(1, prompts, done, offline)
    assert [s.composed for s in rollout.samples] == [p.composed for p in prompts]
    saved = json.loads(json.dumps(asdict(rollout)))
    assert rollout_from(saved) == rollout
    for prompt in saved["prompts"]:
        del prompt["composed"]  # as before there was this field
    assert [p.composed for p in rollout_from(saved).prompts] == [()] * 10
