"""Prompts of corpus and group cartridges: what each is about, is read with, and trains."""

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from math import sqrt
from typing import Any

import pytest
from small_run import ROOT

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.clinic.text import Patient, PatientQuestion
from cartridge_forge.plugins.documents.study.agreement import StudyQuestion
from cartridge_forge.plugins.documents.study.longhealth import (
    LongHealthPrompts,
    LongHealthQuestion,
    measure,
    read_patients,
)
from cartridge_forge.plugins.documents.study.prompts import titles_of
from cartridge_forge.plugins.documents.study.rows import gains, weighed
from cartridge_forge.plugins.documents.synthesis_rows import StudyRow
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.layout import CartridgeLayout
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef
from cartridge_forge.training.records import as_rollout, as_rows, rollout_from, with_title

MESH = str(ROOT / "meshes" / "longhealth.yaml")
TOKENIZER = load_tokenizer(str(ROOT / "models" / "clinic-reader"))
CHUNK = 100  # tokens, of charts of some 230


def learn(*sets: str) -> LearnSpec:
    return load_spec(MESH, sets=["rollout.prompts=8", *sets]).spec.learn


def prompts(spec: LearnSpec, most: int | None = None) -> LongHealthPrompts:
    return LongHealthPrompts(spec, read_patients(spec.data), TOKENIZER, most)


def said(run: LongHealthPrompts, ids: tuple[int, ...]) -> str:
    """Return what the user says in a prompt."""
    return str(TOKENIZER.decode(list(ids[1:-2]))).strip()


def test_one_cartridge_learns_from_every_chunk_that_a_prompt_is_about() -> None:
    run = prompts(learn("cartridge.per=corpus", "rollout.kinds=[choice]"), CHUNK)
    assert len(run.texts) > 2 * len(run.patients)
    met = set()
    for step in range(40):
        for p in run.rollout(step, 3):
            assert (p.cartridge, p.request.prefix) == ("corpus", PrefixRef("cartridge/corpus", 3))
            name, _, asked = said(run, p.request.prompt_ids).partition(": ")
            assert name == run.patients[p.document].name
            # "what about CUE? options: ..." is about the chunk that has the sentence of the cue.
            cue = asked.removeprefix("what about ").partition("?")[0]
            assert any(cue in run.texts[c] for c in p.contexts)
            assert {run.layout.documents[c] for c in p.contexts} == {p.document}
            met.update(p.contexts)
    assert met == set(run.texts)
    assert [p.document for p in run.rollout(0, 0)] == 2 * sorted(run.patients)


def test_an_exam_reads_the_chunk_that_answers_it() -> None:
    run = prompts(learn("cartridge.per=corpus"), CHUNK)
    over = {
        arm: run.exam_requests(run.exams, arm, prefix, 5, False)
        for arm, prefix in (("on_policy", "cartridge"), ("document", "document"), ("none", "none"))
    }
    for i, exam in enumerate(run.exams):
        name = run.patients[exam.question.patient].name
        assert said(run, exam.prompt_ids).startswith(f"{name}: what is the ")
        assert exam.bare_ids == exam.prompt_ids
        fact = exam.question.text.removeprefix("what is the ").removesuffix("?")
        (chunk,) = exam.contexts
        assert f"{fact} {exam.question.correct}." in run.texts[chunk]
        assert over["on_policy"][i].prefix == PrefixRef("cartridge/corpus", 5)
        assert over["document"][i].prefix == PrefixRef(f"document/{chunk}", 0)
        assert over["none"][i].prefix == PrefixRef("document/none", 0)
    (answer, *_) = run.answers(run.exams[:1], ["the answer is x."], [4])
    assert (answer.document, answer.cartridge) == (run.exams[0].question.patient, "corpus")
    assert answer.contexts == run.exams[0].contexts


def test_the_questions_of_a_corpus_pair_with_those_of_single_documents() -> None:
    """The name before a prompt is no part of the question."""
    alone, corpus = prompts(learn()), prompts(learn("cartridge.per=corpus"))
    both = [r.answers(r.exams, [""] * len(r.exams), [0] * len(r.exams)) for r in (alone, corpus)]
    keys = [[(a.id, a.document_hash, a.question_hash) for a in answers] for answers in both]
    assert keys[0] == keys[1]
    assert said(alone, alone.exams[0].prompt_ids).startswith("what is the")


def test_a_document_of_two_groups_trains_both() -> None:
    groups = "cartridge.groups={x: [patient_01, patient_02], y: ['patient_0[2-4]']}"
    run = prompts(learn("cartridge.per=group", groups, "rollout.prompts=10"))
    asked = [(p.document, p.cartridge) for p in run.rollout(0, 0)]
    turns = [("patient_01", "x"), ("patient_02", "x"), ("patient_02", "y"), ("patient_03", "y"),
             ("patient_04", "y")]  # fmt: skip
    assert asked == 2 * turns
    exam = next(e for e in run.exams if e.question.patient == "patient_02")
    (request,) = run.exam_requests([exam], "a", "cartridge", 0, False)
    assert request.prefix.name == "cartridge/x"


@pytest.mark.parametrize(
    ("choice", "shared", "named"),
    [("auto", True, True), ("auto", False, False), ("always", False, True), ("never", True, False)],
)
def test_when_prompts_name_their_document(choice: str, shared: bool, named: bool) -> None:
    data = learn(f"data.name_document={choice}").data
    layout = CartridgeLayout(
        {"a": "a", "b": "b"}, {"all": ("a", "b")} if shared else {"a": ("a",), "b": ("b",)}
    )
    titles = titles_of(data, layout, {"a": "ada novak", "b": "ida weber"})
    assert with_title(titles, "a", "why?") == ("ada novak: why?" if named else "why?")
    twins = titles_of(data, layout, {"a": "ada novak", "b": "ada novak"})
    assert with_title(twins, "b", "why?") == ("b: why?" if named else "why?")


def finished(run: LongHealthPrompts) -> Any:
    asked = run.rollout(0, 2)
    done = [Completion(p.request.id, (9, 2), (-0.1, -0.2), (2, 2), "stop") for p in asked]
    return as_rollout(0, asked, done, offline=False)


def test_samples_and_rows_tell_cartridge_contexts_and_prompt() -> None:
    rollout = finished(prompts(learn("cartridge.per=corpus"), CHUNK))
    rows = as_rows(rollout, "on_policy", 1, lambda ids: "")
    for p, sample, row in zip(rollout.prompts, rollout.samples, rows, strict=True):
        assert (sample.cartridge, sample.contexts) == ("corpus", p.contexts)
        assert sample.prompt == p.prompt != ""
        assert (row.document, row.cartridge, row.contexts) == (p.document, "corpus", p.contexts)
    assert rollout_from(json.loads(json.dumps(dataclasses.asdict(rollout)))) == rollout


def test_a_checkpoint_from_before_cartridges_had_names_is_resumed() -> None:
    rollout = finished(prompts(learn()))
    old = json.loads(json.dumps(dataclasses.asdict(rollout)))
    for p, s in zip(old["prompts"], old["samples"], strict=True):
        s["document"] = s.pop("cartridge")
        for key in ("contexts", "prompt"):
            del p[key], s[key]
        del p["cartridge"]
    found = rollout_from(old)
    assert [(s.cartridge, s.contexts) for s in found.samples] == [
        (s.cartridge, s.contexts) for s in rollout.samples
    ]
    assert [p.contexts for p in found.prompts] == [p.contexts for p in rollout.prompts]


def test_patients_are_told_apart_by_name() -> None:
    patients = [
        Patient(f"p{i}", "n", "b", "d", (f"sodium {i}{i} mmol. nurse weber.",), ()) for i in (1, 2)
    ]
    run = LongHealthPrompts(learn("cartridge.per=corpus", "data.patients=2"), patients, TOKENIZER)
    assert run.titles == {"p1": "p1", "p2": "p2"}


Z = 1.959963984540054


def exam(correct: str, *options: str) -> LongHealthQuestion:
    options = options or ("stenosis", "fracture", "cyst", "ulcer", "normal")
    question = PatientQuestion("patient_01/0", "patient_01", "which?", options, correct)
    return LongHealthQuestion(question, "what?", (4, 5), (4, 5), ("p",))


def test_right_wrong_and_unreadable() -> None:
    exams = [exam("cyst"), exam("ulcer"), exam("normal"), exam("stenosis")]
    answers = [
        "the answer is cyst.",  # right
        "answer: d",  # right, by letter
        "the answer is cyst.",  # wrong
        "normal",  # names no answer: wrong, and counted apart
    ]
    measured = measure(exams, answers)
    assert measured["accuracy"] == 0.5
    assert measured["n"] == 4
    assert measured["parse_failures"] == 1
    # k = 2 of n = 4: the middle is 0.5, half = z sqrt(2 * 2 / 4 + z^2 / 4) / (4 + z^2) = 0.34996
    half = Z * sqrt(1 + Z * Z / 4) / (4 + Z * Z)
    assert measured["ci95"] == pytest.approx([0.5 - half, 0.5 + half])
    assert measured["ci95"] == pytest.approx([0.15004, 0.84996], abs=1e-5)


def test_an_unreadable_answer_is_not_option_a() -> None:
    measured = measure([exam("stenosis")] * 3, ["", "I cannot say.", "the answer is unknown."])
    assert (measured["accuracy"], measured["parse_failures"]) == (0.0, 3)


def test_either_of_two_letters_with_the_right_text_is_right() -> None:
    twins = exam("VRd", "VCD", "VRd", "KRd", "VRd", "none of these")
    answers = ["answer: b", "answer: d", "the answer is VRd", "answer: a"]
    assert measure([twins] * 4, answers)["accuracy"] == 0.75


def test_all_right() -> None:
    measured = measure([exam("cyst")] * 10, ["answer: c"] * 10)
    # Wilson at k = n = 10: the lower end is 10 / (10 + z^2)
    assert measured == {
        "accuracy": 1.0,
        "ci95": [pytest.approx(10 / (10 + Z * Z)), 1.0],
        "n": 10,
        "parse_failures": 0,
    }


def test_an_answer_is_missing() -> None:
    with pytest.raises(ValueError, match="zip"):
        measure([exam("cyst")] * 2, ["answer: c"])


def question(key: str, answer: tuple[int, ...]) -> StudyQuestion:
    return StudyQuestion(key, "kestrel", "cloze", (), (5, 6), answer)


def row(key: str) -> StudyRow:
    return StudyRow(
        key=key, document="kestrel", source="k", sha256="0", tokens=(0, 1), chars=(0, 1),
        kind="cloze", asker="plain", question="?", question_sampling={}, question_seed=0,
        answer_sampling={}, answer_seed=0, model="m", config="c", generator="g", time="t",
    )  # fmt: skip


def test_the_gain_is_what_the_document_adds_to_an_answers_mean_log_probability() -> None:
    """a: (-1 - 3)/2 with the document, (-5 - 5)/2 without: 3. b: the same either way."""
    logprobs = {
        "gain/document/a": (-9.0, -1.0, -3.0), "gain/none/a": (-9.0, -5.0, -5.0),
        "gain/document/b": (-9.0, -2.0), "gain/none/b": (-9.0, -2.0),
    }  # fmt: skip
    asked: list[GenerateRequest] = []

    async def generate(requests: Sequence[GenerateRequest], *_: object) -> list[Completion]:
        asked.extend(requests)
        return [
            Completion(r.id, (), (), (), "length", prompt_logprobs=logprobs[r.id]) for r in requests
        ]

    studied = [question("a", (7, 8)), question("b", (7,)), question("unanswered", ())]
    bare = {key: (1, 5, 6) for key in ("a", "b", "unanswered")}
    found = asyncio.run(gains(studied, bare, generate))
    assert found == {"a": 3.0, "b": 0.0}
    assert [(r.prompt_ids, r.prefix.name) for r in asked[:2]] == [
        ((5, 6, 7, 8), "document/kestrel"), ((1, 5, 6, 7, 8), "document/none"),
    ]  # fmt: skip
    rows = weighed([row("a"), row("b"), row("unanswered")], found, 0.1)
    assert [(r.gain, r.refused) for r in rows] == [(3.0, ""), (0.0, "no_gain"), (None, "")]
