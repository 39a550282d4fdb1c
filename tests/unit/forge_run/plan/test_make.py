"""The plan of `forge make`, worked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_run.plan.make import MakePlan, ModelBytes, cartridge_tokens, planned
from learning.calibration import MachineRates
from protocols.errors import DataError
from protocols.spec.learn import LearnSpec
from protocols.spec.loading import load_spec

ROOT = Path(__file__).parents[4]
RATES = MachineRates(forward=400.0, backward=112.0, decode=64.0)
SIZE = ModelBytes(weights=500_000_000, token=1000)


@pytest.fixture
def learn() -> LearnSpec:
    sets = ("self_study.questions=40", "self_study.min_chunk=512", "self_study.max_chunk=4096",
            "train.steps=160", "train.warm_start.steps=140")  # fmt: skip
    return load_spec("documents", sets=sets).spec.learn


def test_the_cartridge_s_tokens() -> None:
    assert cartridge_tokens([1000, 1560], None, None) == 128  # 1280 / 10
    assert cartridge_tokens([100], None, None) == 32
    assert cartridge_tokens([90_000], None, None) == 512
    assert cartridge_tokens([1000], 70, None) == 70
    assert cartridge_tokens([1000], None, 16.0) == 62  # 62.5, to the even one
    with pytest.raises(DataError, match=r"--ratio 900 gives a cartridge of 1 tokens, and 2 is the"):
        cartridge_tokens([1000], None, 900.0)


def test_twenty_minutes_for_one_document(learn: LearnSpec) -> None:
    """A question: 1000 / 400 + 48 / 64 = 3.25 s, so 40 take 130 s, under a quarter of 1200 s.
    Before the first step: 45 + 2 * 1000 / 400 + 130 = 180 s.
    The exam: 8 * 64 * (1/64 + 1/400) = 9.28 s. An answer: 64/64 + 160/400 + 112/112 = 2.4 s, so a
    step of 16 takes 39.4 s, of which 25 fit in 1010.72 s; of 8 answers 20.2 s, of which 50 fit."""
    found = planned([1000], 100, 20, RATES, learn, SIZE)
    assert (found.questions, found.prompts, found.steps) == (40, 8, 50)
    assert found.start_seconds == pytest.approx(180)
    assert found.step_seconds == pytest.approx(20.2)
    assert found.seconds == pytest.approx(180 + 1010 + 9.28)
    assert found.memory == 3 * 500_000_000 + 2 * 1000 * 1000 + 6 * 300 * 1024**2
    assert found.told()[0] == (
        "one document of 1,000 tokens in all; one cartridge of 100 tokens, 10.0x fewer"
    )
    assert found.told()[2] == (
        "40 questions about each document, then 50 steps of 8 answers, 20 s each"
    )
    assert found.told()[3].startswith("about 20 minutes: the first step after 3.0;")


def test_more_minutes_take_a_larger_batch(learn: LearnSpec) -> None:
    """Of 1789.28 s + 600 s, less the start and the exam, 60 steps of 39.4 s fit."""
    found = planned([1000], 100, 43, RATES, learn, SIZE)
    assert (found.prompts, found.steps) == (16, 60)


def test_few_minutes_ask_fewer_questions(learn: LearnSpec) -> None:
    """A quarter of 240 s is 60 s: 18 questions of 3.25 s. 240 - 45 - 5 - 58.5 - 9.28 = 122.22 s
    hold 11 steps of 4 answers, 10.6 s each."""
    found = planned([1000], 100, 4, RATES, learn, SIZE)
    assert (found.questions, found.prompts, found.steps) == (18, 4, 11)


def test_too_few_minutes_are_told_how_many_it_takes(learn: LearnSpec) -> None:
    """8 questions: 45 + 5 + 26 + 9.28 + 4 * 10.6 = 127.7 s."""
    with pytest.raises(DataError, match=r"at least 2 minutes here, and --minutes is 1; raise it"):
        planned([1000], 100, 1, RATES, learn, SIZE)


def test_the_plan_s_keys_are_keys_of_the_mesh(learn: LearnSpec) -> None:
    plan = planned([1000], 100, 20, RATES, learn, SIZE)
    assert isinstance(plan, MakePlan)
    spec = load_spec("documents", sets=plan.sets).spec
    assert (spec.learn.cartridge.tokens, spec.learn.train.steps) == (100, 50)
    assert spec.learn.train.checkpoint_every == 16
    assert spec.learn.train.warm_start is not None
    assert spec.learn.train.warm_start.steps == 44  # as large a share as 140 of 160
    assert spec.learn.evaluate.arms == ("on_policy",)
    assert spec.mesh.roles.generator.replicas == 1
