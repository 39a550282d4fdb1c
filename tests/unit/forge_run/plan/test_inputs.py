"""Test what a plan says of documents, of rows and of `forge make`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cartridge_forge.forge_run.plan.datasets import require_dataset, row_notes, sections
from cartridge_forge.forge_run.plan.make import MakePlan, ModelBytes, cartridge_tokens, planned
from cartridge_forge.plugins.evaluate.calibration import MachineRates
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.statistics.formatting import render
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.learn import LearnSpec

ROOT = Path(__file__).resolve().parents[4]


def spec(*sets: str) -> LearnSpec:
    mesh = ROOT / "examples" / "gsm8k_like" / "mesh.yaml"
    path = ROOT / "tests" / "data" / "sums.jsonl"
    return load_spec(str(mesh), sets=(f"data.path={path}", *sets)).spec.learn


def test_a_plan_counts_rows_and_names_rewards() -> None:
    learn, found = sections(spec())
    told = render(found, terminal=False)
    assert learn.data.patients == 1
    for line in (
        "answers     12 rows have one",
        "documents   1, of 12 rows",
        "columns     answer, document, page, prompt, question, target",
        "rewards:correct in ",
        "10 s, 2,048 MiB",
    ):
        assert line in told


def test_other_data_has_no_such_section() -> None:
    learn = load_spec(str(ROOT / "meshes" / "longhealth.yaml")).spec.learn
    assert sections(learn) == (learn, [])


def test_rows_without_documents_train_nothing_without_rewards() -> None:
    learn = spec(
        "episodes=null", "reward=[]", "objective.w_rl=0", "objective.w_doc=1", "rollout.prompts=8",
        "data.rows.columns={prompt: question, answer: target}",
    )  # fmt: skip
    with pytest.raises(DataError, match=r"sums.jsonl:\d+: has no document \(12 rows have none\)"):
        require_dataset(learn)


def test_rows_longer_than_an_episodes_context_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    sets = (
        f"data.path={file}", "data.rows.columns={prompt: question, answer: target}",
        f"model.path={ROOT / 'models' / 'clinic-reader'}",
    )  # fmt: skip

    def notes(questions: list[str]) -> list[str]:
        lines = (json.dumps({"question": text, "target": "1"}) for text in questions)
        file.write_text("\n".join(lines))
        return row_notes(spec(*sets))

    asked = [f"What is {n} and 1?" for n in range(30)]
    long = [f"{text} {'again and ' * 400}" for text in asked]
    told = " ".join(notes([*long[:3], *asked[3:]]))
    assert (
        "rows have prompts over episodes.max_context (96 tokens), the longest rows.jsonl:" in told
    )
    assert sum(map(int, re.findall(r"(\d+) of \d+ (?:training|held-out) rows", told))) == 3
    assert "their episodes end at once as context_full" in told
    _, found = sections(spec(*sets))
    assert "prompts of rows" in [one.title for one in found]
    assert notes(asked) == []
    with pytest.raises(DataError, match=r"none is left; raise episodes\.max_context"):
        notes(long)


MAKE_ROOT = Path(__file__).parents[4]
RATES = MachineRates(forward=400.0, backward=112.0, decode=64.0)
SIZE = ModelBytes(weights=500_000_000, token=1000)


@pytest.fixture
def learn() -> LearnSpec:
    sets = ("self_study.questions=40", "self_study.min_chunk=512", "self_study.max_chunk=4096",
            "train.steps=160", "train.warm_start.steps=140", "rollout.verify=null",
            "cartridge.init=first_tokens")  # fmt: skip
    return load_spec("documents", sets=sets).spec.learn


def test_the_cartridge_s_tokens() -> None:
    assert cartridge_tokens([1000, 1560], None, None) == 128  # 1280 / 10
    assert cartridge_tokens([1000, 17, 1560], None, None) == 128  # 17 are too short for any
    assert cartridge_tokens([100], None, None) == 32
    assert cartridge_tokens([90_000], None, None) == 512
    assert cartridge_tokens([1000], 70, None) == 70
    assert cartridge_tokens([1000], None, 16.0) == 62  # 62.5, to the even one
    with pytest.raises(DataError, match=r"--ratio 900 gives a cartridge of 1 tokens, and 2 is the"):
        cartridge_tokens([1000], None, 900.0)


def test_twenty_minutes_for_one_document(learn: LearnSpec) -> None:
    """Before the first step: 20 + 2 * 1000 / 400 = 25 s. Exam: 8 * 64 * (1/64 + 1/400) = 9.28 s.
    An answer of the document's words: 80/112 = 0.714 s, in 7 of 8 steps; one of its own:
    64/64 + 160/400 + 112/112 = 2.4 s; mean 0.925 s. A step of 16 takes 15.8 s, and the teacher
    reads each of 40 questions once in 80/400 s, 8 s: 73 steps fit in 1165.72."""
    found = planned([1000], 100, 20, RATES, learn, SIZE)
    assert (found.questions, found.prompts, found.steps) == (40, 16, 73)
    assert found.start_seconds == pytest.approx(25)
    assert found.step_seconds == pytest.approx(15.8 + 8 / 73)
    assert found.seconds == pytest.approx(25 + 73 * 15.8 + 8 + 9.28)
    assert found.memory == 3 * 500_000_000 + 2 * 1000 * 1000 + 6 * 300 * 1024**2
    assert found.told()[0] == (
        "one document of 1,000 tokens in all; one cartridge of 100 tokens, 10.0x fewer"
    )
    assert found.told()[2] == (
        "40 questions about each document, then 73 steps of 16 answers, 16 s each"
    )
    assert found.told()[3].startswith("about 20 minutes: the first step after 0.4;")


def test_attention_matching_takes_time_before_the_first_step(learn: LearnSpec) -> None:
    """Rows of 1,024 tokens of either document, and 1,024 of study: 6 * 4096; gains: 2 * 3072.
    With reading twice 20 + (10240 + 24576 + 6144) / 400 = 122.4 s; without matching 45.6."""
    matched = learn.cartridge.model_copy(update={"init": "attention_matching"})
    other = learn.model_copy(update={"cartridge": matched})
    counts = [1024, 4096]
    assert planned(counts, 100, 20, RATES, other, SIZE).start_seconds == pytest.approx(122.4)
    assert planned(counts, 100, 20, RATES, learn, SIZE).start_seconds == pytest.approx(45.6)


def test_fewer_minutes_take_a_smaller_batch(learn: LearnSpec) -> None:
    """Of 480 s, less 34.28 and 8, 27 steps of 15.8 s fit, and 52 of 8 answers, 8.4 s each."""
    found = planned([1000], 100, 8, RATES, learn, SIZE)
    assert (found.prompts, found.steps) == (8, 52)


def test_steps_too_few_for_a_second_reading_read_every_text(learn: LearnSpec) -> None:
    """2,000 questions outlast the steps: of 16 answers that are read anew 62 of 18.6 s fit."""
    assert learn.self_study is not None
    study = learn.self_study.model_copy(update={"questions": 2000})
    found = planned([1000], 100, 20, RATES, learn.model_copy(update={"self_study": study}), SIZE)
    assert (found.prompts, found.steps) == (16, 62)
    assert found.step_seconds == pytest.approx(18.6)


def test_without_a_warm_start_every_answer_is_written(learn: LearnSpec) -> None:
    """A step of 8 takes 1 + 8 * 2.4 = 20.2 s: 57 of them fit in 1165.72 s, and 29 of 16 answers."""
    cold = learn.model_copy(update={"train": learn.train.model_copy(update={"warm_start": None})})
    found = planned([1000], 100, 20, RATES, cold, SIZE)
    assert (found.prompts, found.steps, found.warm) == (8, 57, 0)


@pytest.mark.parametrize(("minutes", "questions", "start"), [(20, 40, 90.0), (4, 36, 83.5)])
def test_questions_that_the_model_writes_take_time(
    learn: LearnSpec, minutes: float, questions: int, start: float
) -> None:
    """Half of them: 0.5 * (1000 / 400 + 48 / 64) = 1.625 s each, 65 s for 40. A quarter of 240 s is
    60 s: 36 of them, 58.5 s."""
    assert learn.self_study is not None
    study = learn.self_study.model_copy(update={"mix": {"recite": 1.0, "quiz": 1.0}})
    found = planned(
        [1000], 100, minutes, RATES, learn.model_copy(update={"self_study": study}), SIZE
    )
    assert found.questions == questions
    assert found.start_seconds == pytest.approx(start)


def test_what_the_document_verifies_takes_more_seconds(learn: LearnSpec) -> None:
    """Written in 1.85 * (64/64 + 48/400) = 2.072 s, an answer takes 2.072 + 112/400 + 112/112 =
    3.352 s in one of 8 steps. A step of 16 takes 1 + 10 + 6.704 = 17.704 s: 65 fit in
    1165.72 - 8."""
    other = load_spec("documents").spec.learn.rollout.verify
    assert other is not None
    rollout = learn.rollout.model_copy(update={"verify": other})
    found = planned([1000], 100, 20, RATES, learn.model_copy(update={"rollout": rollout}), SIZE)
    assert (found.prompts, found.steps, found.warm) == (16, 65, 57)
    assert found.step_seconds == pytest.approx(17.704 + 8 / 65)


def test_the_shipped_plan_trains_on_the_document_s_own_words_to_the_end() -> None:
    """Every step of 16 answers takes 1 + 16 * 0.714 s = 12.43 s, and what the teacher reads once
    does not depend on the steps."""
    learn = load_spec("documents", sets=("self_study.questions=40",)).spec.learn
    found = planned([1000], 100, 20, RATES, learn, SIZE)
    assert found.warm == found.steps
    assert found.step_seconds == pytest.approx(1 + 16 * 80 / 112 + 8 / found.steps)
    spec = load_spec("documents", sets=found.sets).spec
    assert spec.learn.train.warm_start is not None
    assert spec.learn.train.warm_start.steps == spec.learn.train.steps == found.steps


def test_too_few_minutes_are_told_how_many_it_takes(learn: LearnSpec) -> None:
    """25 + 9.28 + 4 * 5.4 = 55.88 s."""
    with pytest.raises(DataError, match=r"at least 1 minutes here, and --minutes is 0.8; raise it"):
        planned([1000], 100, 0.8, RATES, learn, SIZE)


def test_the_plan_s_keys_are_keys_of_the_mesh(learn: LearnSpec) -> None:
    plan = planned([1000], 100, 20, RATES, learn, SIZE)
    assert isinstance(plan, MakePlan)
    spec = load_spec("documents", sets=plan.sets).spec
    assert (spec.learn.cartridge.tokens, spec.learn.train.steps) == (100, 73)
    assert spec.learn.train.checkpoint_every == 24
    assert spec.learn.train.warm_start is not None
    assert spec.learn.train.warm_start.steps == 64  # as large a share as 140 of 160
    assert spec.learn.evaluate.arms == ("on_policy",)
    assert spec.mesh.roles["generator"].replicas == 1


def test_questions_are_answered_by_what_else_as_many_tokens_could_hold(learn: LearnSpec) -> None:
    """Five arms answer in 5 * 9.28 s, and two of them read 8 * 100 / 400 s of passages each."""
    asking = learn.data.model_copy(update={"questions": "questions.json"})
    plan = planned([1000], 100, 20, RATES, learn.model_copy(update={"data": asking}), SIZE)
    assert plan.seconds == pytest.approx(25 + 70 * 15.8 + 8 + 46.4 + 4.0)
    spec = load_spec("documents", sets=[*plan.sets, "data.questions=questions.json"]).spec
    assert spec.learn.evaluate.arms == (
        "none", "document", "retrieved", "on_policy", "retrieved_cartridge",
    )  # fmt: skip


def test_parts_of_long_documents_are_not_called_documents(learn: LearnSpec) -> None:
    told = planned([1000] * 7, 100, 60, RATES, learn, SIZE, 3).told()
    assert told[0].startswith("3 documents in 7 parts of 7,000 tokens in all; 7 cartridges of 100")
    assert "questions about each part" in told[2]
    alone = planned([1000], 100, 20, RATES, learn, SIZE).told()
    assert alone[0].startswith("one document of 1,000 tokens in all; one cartridge of 100 tokens")
