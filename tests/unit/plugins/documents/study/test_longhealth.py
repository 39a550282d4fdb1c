"""What is asked when: exact tokens, disjoint questions, and draws that hang on nothing else."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rooms.training.rsa_runs import learn, tasks
from transformers import PreTrainedTokenizerFast

from cartridge_forge.plugins.clinic.text import Patient, option_prompt, sentence_ends
from cartridge_forge.plugins.documents.study.longhealth import LongHealthPrompts, read_patients
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.step import (
    PrefixRef,
    Sampling,
    stream_seed,
)
from models.pretrain.tokenizer import build_tokenizer

BOS, END, USER, ASSISTANT = 1, 2, 4, 5


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def whole(tokenizer: Any, document: str | None, user: str) -> list[int]:
    """The conversation through the template in one go, as a served model would be asked."""
    system = [{"role": "system", "content": document}] if document is not None else []
    ids: list[int] = tokenizer.apply_chat_template(
        [*system, {"role": "user", "content": user}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    return ids


def text_of(tokenizer: Any, prompt_ids: Sequence[int]) -> str:
    """What the user says in a prompt."""
    assert prompt_ids[0] == USER
    assert tuple(prompt_ids[-2:]) == (END, ASSISTANT)
    text: str = tokenizer.decode(list(prompt_ids[1:-2]))
    return text.removeprefix(" ")


def test_document_and_prompt_join_to_the_conversation(tokenizer: PreTrainedTokenizerFast) -> None:
    run = tasks(tokenizer, learn())
    for step in range(5):
        for prompt in run.rollout(step, 0):
            document = run.patients[prompt.document].document
            asked = text_of(tokenizer, prompt.request.prompt_ids)
            joined = [*run.documents[prompt.document], *prompt.request.prompt_ids]
            assert joined == whole(tokenizer, document, asked)
            assert joined.count(BOS) == 1


def test_exams_join_to_the_conversation_too(tokenizer: PreTrainedTokenizerFast) -> None:
    run = tasks(tokenizer, learn(instruction="name the option."))
    assert run.exams
    for exam in run.exams:
        q = exam.question
        text = option_prompt(q.text, q.options, "name the option.")
        document = run.patients[q.patient].document
        joined = [*run.documents[q.patient], *exam.prompt_ids]
        assert joined == whole(tokenizer, document, text)
        assert [*run.documents["none"], *exam.bare_ids] == whole(tokenizer, None, text)


def test_no_document_is_the_beginning_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    run = tasks(tokenizer, learn())
    assert run.documents["none"] == (BOS,)
    assert set(run.documents) == {"patient_01", "patient_02", "patient_03", "none"}
    assert run.end_ids == frozenset({END})


def test_decoding_is_for_people(tokenizer: PreTrainedTokenizerFast) -> None:
    run = tasks(tokenizer, learn())
    ids = tokenizer("the answer is cyst.").input_ids
    assert run.decode((*ids, END)) == "the answer is cyst."
    assert run.decode(()) == ""


def test_no_held_out_question_is_ever_asked_in_training(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    run = tasks(tokenizer, learn(prompts=6))
    everything = {q.text for p in run.patients.values() for q in p.questions}
    held_out = {(e.question.patient, e.question.text) for e in run.exams}
    asked = {
        (p.document, text_of(tokenizer, p.request.prompt_ids), p.kind)
        for step in range(200)
        for p in [*run.rollout(step, step), *run.offline(step)]
    }
    trained = {(document, text) for document, text, _ in asked if text in everything}
    rest = {text for _, text, kind in asked if kind != "question"}
    assert not trained & held_out
    assert not rest & everything, "the other kinds ask no question"
    # Between them they are all there is: 3 patients of 12 questions.
    assert len(trained) + len(held_out) == 36
    assert min(len(trained), len(held_out)) >= 9


def test_with_everything_held_out_training_asks_no_question(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    run = tasks(tokenizer, learn(held_out=1.0, kinds=("recite", "question")))
    assert len(run.exams) == 36
    questions = {q.text for p in run.patients.values() for q in p.questions}
    asked = {text_of(tokenizer, p.request.prompt_ids) for s in range(20) for p in run.rollout(s, 0)}
    assert len(asked) > 40
    assert not asked & questions


def test_kinds_of_the_spec_are_the_kinds_asked(tokenizer: PreTrainedTokenizerFast) -> None:
    run = tasks(tokenizer, learn(kinds=("structure", "summarise")))
    assert {p.kind for step in range(20) for p in run.rollout(step, 0)} == {
        "structure",
        "summarise",
    }


def test_exams_take_patients_in_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    run = tasks(tokenizer, learn(held_out=1.0, questions=7))
    assert [e.question.id for e in run.exams] == [
        "patient_01/0", "patient_02/0", "patient_03/0",
        "patient_01/1", "patient_02/1", "patient_03/1",
        "patient_01/2",
    ]  # fmt: skip


def test_without_a_held_out_question_there_is_no_exam(tokenizer: PreTrainedTokenizerFast) -> None:
    run = tasks(tokenizer, learn(held_out=1e-9))
    with pytest.raises(DataError) as caught:
        _ = run.exams
    assert str(caught.value) == (
        "no held-out question: raise data.held_out (the share kept for evaluation) or "
        "give more questions"
    )


def test_steps_and_seeds_ask_different_things(tokenizer: PreTrainedTokenizerFast) -> None:
    run, other = tasks(tokenizer, learn()), tasks(tokenizer, learn(seed=1))
    asked = {tuple(p.request.prompt_ids for p in run.rollout(step, 0)) for step in range(10)}
    asked |= {tuple(p.request.prompt_ids for p in other.rollout(step, 0)) for step in range(10)}
    assert len(asked) == 20
    seeds = [p.request.seed for s in range(10) for r in (run, other) for p in r.rollout(s, 0)]
    assert len(set(seeds)) == 80


def test_a_prepared_step_is_the_same_and_is_not_made_again(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, plain = tasks(tokenizer, learn()), tasks(tokenizer, learn())
    expected = plain.rollout(3, 7)
    prepared.prepare(3)
    assert prepared.rollout(2, 7) == plain.rollout(2, 7), "another step is made as ever"
    prepared.prepare(3)
    monkeypatch.delattr("cartridge_forge.plugins.documents.study.longhealth.self_study_prompt")
    assert prepared.rollout(3, 7) == expected
    with pytest.raises(NameError):
        prepared.rollout(3, 7)  # what was used is not kept


def test_choices_offer_the_ends_of_all_documents(tokenizer: PreTrainedTokenizerFast) -> None:
    """Distractors of 12 facts alone would soon all be known by heart."""
    run = tasks(tokenizer, learn(kinds=["choice"], patients=3))
    own = {p.id: set(sentence_ends(p)) for p in run.patients.values()}
    lent = 0
    for step in range(40):
        for prompt in run.rollout(step, 0):
            said = text_of(tokenizer, prompt.request.prompt_ids)
            options = re.split(r" ?[a-e]\) ", said.split("options: ")[-1])[1:]
            others = set.union(*(ends for name, ends in own.items() if name != prompt.document))
            lent += len({o.strip() for o in options} & (others - own[prompt.document]))
    assert lent > 40, "a few of the 160 choices take one at least"


def test_both_arms_study_the_same_material(tokenizer: PreTrainedTokenizerFast) -> None:
    run = tasks(tokenizer, learn())
    for step in range(6):
        rollout, offline = run.rollout(step, step + 10), run.offline(step)
        for ours, theirs in zip(rollout, offline, strict=True):
            assert (ours.document, ours.kind) == (theirs.document, theirs.kind)
            assert ours.request.prompt_ids == theirs.request.prompt_ids
            assert ours.request.sampling == theirs.request.sampling
            assert ours.request.seed != theirs.request.seed
            assert ours.request.prefix == PrefixRef(f"cartridge/{ours.document}", step + 10)
            assert theirs.request.prefix == PrefixRef(f"document/{ours.document}", 0)


def test_a_request_in_full(tokenizer: PreTrainedTokenizerFast) -> None:
    request = tasks(tokenizer, learn()).rollout(2, 9)[1].request
    assert request.id == "on_policy/3/1"  # steps count from 1 for people
    assert request.sampling == Sampling(temperature=0.7, top_p=0.9, top_k=40, max_tokens=24)
    expected = hashlib.sha256(b"sample/0/on_policy/3/1").digest()[:8]
    assert request.seed == int.from_bytes(expected, "big") // 2


def test_documents_take_turns(tokenizer: PreTrainedTokenizerFast) -> None:
    """4 prompts a step over 3 documents: 1231, 2312, 3123, and round again."""
    run = tasks(tokenizer, learn(prompts=4))
    turns = ["".join(p.document[-1] for p in run.rollout(step, 0)) for step in range(4)]
    assert turns == ["1231", "2312", "3123", "1231"]
    few = tasks(tokenizer, learn(prompts=2))
    assert ["".join(p.document[-1] for p in few.rollout(s, 0)) for s in range(3)] == [
        "12",
        "31",
        "23",
    ]


@pytest.mark.parametrize("name", ["", "sample/0/on_policy/3/1", "exam/0/é"])
def test_seeds_are_63_bits_of_the_names_digest(name: str) -> None:
    assert stream_seed(name) == int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) // 2
    assert 0 <= stream_seed(name) < 2**63


def test_arms_differ_by_their_prefix_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    run = tasks(tokenizer, learn(questions=6))
    document = run.exam_requests(run.exams, "document", "document", 0, False)
    cartridge = run.exam_requests(run.exams, "on_policy", "cartridge", 40, False)
    none = run.exam_requests(run.exams, "none", "none", 0, False)
    for exam, d, c, n in zip(run.exams, document, cartridge, none, strict=True):
        q = exam.question
        assert d.id == f"evaluate/document/{q.id}"
        assert c.id == f"evaluate/on_policy/{q.id}"
        assert d.prefix == PrefixRef(f"document/{q.patient}", 0)
        assert c.prefix == PrefixRef(f"cartridge/{q.patient}", 40)
        assert n.prefix == PrefixRef("document/none", 0)
        assert d.prompt_ids == c.prompt_ids == exam.prompt_ids
        assert n.prompt_ids == exam.bare_ids
        assert d.seed == c.seed == n.seed == stream_seed(f"exam/0/{q.id}")
        assert d.sampling == c.sampling == n.sampling == Sampling(temperature=0.0, max_tokens=16)
    assert len({d.seed for d in document}) == 6


def test_sampled_exams_have_the_specs_temperature(tokenizer: PreTrainedTokenizerFast) -> None:
    run = tasks(tokenizer, learn(questions=2))
    requests = run.exam_requests(run.exams, "none", "none", 0, True)
    assert {r.sampling for r in requests} == {Sampling(temperature=0.5, max_tokens=16)}


class Characters:
    """A tokenizer whose ids are code points. `counts` writes the number of turns in the head, as
    some templates write the date or the tools: then the document is no prefix of what follows."""

    eos_token_id = 0
    name_or_path = ""
    all_special_tokens: tuple[str, ...] = ()
    all_special_ids: tuple[int, ...] = ()

    def __init__(self, counts: bool) -> None:
        self.counts = counts

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool, **_: Any
    ) -> str:
        head = f"^{len(messages)}" if self.counts else "^"
        body = "".join(f"[{m['role'][0]}]{m['content']}" for m in messages)
        return head + body + ("[a]" if add_generation_prompt else "")

    def __call__(self, text: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(c) for c in text])


def hand_made() -> list[Patient]:
    return [Patient("patient_01", "n", "b", "d", ("so it is.",), ())]


def test_any_tokenizer_with_a_chat_template_will_do() -> None:
    run = LongHealthPrompts(
        learn(patients=1, kinds=("structure",)), hand_made(), Characters(counts=False)
    )
    (prompt, *_) = run.rollout(0, 0)
    assert "".join(map(chr, prompt.request.prompt_ids)) == "[u]list the findings of note 1.[a]"


def test_a_template_that_breaks_the_prefix_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        LongHealthPrompts(learn(patients=1), hand_made(), Characters(counts=True))
    assert str(caught.value) == (
        "a cartridge cannot stand for a document in this chat template: neither the system's text "
        "nor the head of the first user's message is a prefix of every conversation; use a "
        "template that begins with one of them"
    )


def test_a_file_with_too_few_patients_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(
        '{"patient_01": {"name": "n", "birthday": "b", "diagnosis": "d", '
        '"texts": {"text_0": "so it is."}, "questions": []}}'
    )
    data = learn().data.model_copy(update={"path": str(path), "patients": 1})
    assert read_patients(data) == hand_made()
    with pytest.raises(DataError) as caught:
        read_patients(data.model_copy(update={"patients": 2}))
    assert str(caught.value) == f"data.patients is 2 and {path} holds 1; lower it"


def test_the_first_patients_of_a_file_are_taken() -> None:
    spec = learn(patients=2)
    assert read_patients(spec.data) == read_patients(learn(patients=5).data)[:2]


def test_near_doubles_of_held_out_questions_are_not_asked_in_training(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    spec = learn(patients=1)
    (patient,) = read_patients(spec.data)
    stem = "how often was the level of albumin measured in the first week of"
    # 15 words have 13 shingles; those that end otherwise share 12 of 14.
    months = ("march", "april", "june", "july", "august", "autumn", "winter", "spring")
    alike = [
        replace(patient.questions[i], id=f"near/{i}", text=f"{stem} this {month}")
        for i, month in enumerate(months)
    ]
    other = replace(patient, questions=(*patient.questions, *alike))
    tasks = LongHealthPrompts(spec, [other], tokenizer)
    held_out = {e.question.id for e in tasks.exams}
    assert 0 < len(held_out & {q.id for q in alike}) < len(alike)
    training = {q.id for q in tasks._training[patient.id]}
    assert not training & {q.id for q in alike}
    assert training == {q.id for q in patient.questions} - held_out


def test_offline_texts_repeat_the_draws_under_names_of_their_own(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    spec = learn()
    again = spec.model_copy(update={"train": spec.train.model_copy(update={"offline_texts": 2})})

    def drawn(of: LearnSpec, step: int) -> list[tuple[object, ...]]:
        prompts = tasks(tokenizer, of).offline(step)
        return [(p.request.prompt_ids, p.request.seed, p.request.prefix) for p in prompts]

    assert [drawn(again, s) for s in range(5)] == [drawn(spec, s % 2) for s in range(5)]
    assert drawn(spec, 2) != drawn(spec, 0)
    names = [p.request.id for p in tasks(tokenizer, again).offline(2)]
    assert names == [f"offline/3/{i}" for i in range(4)]
    fresh, same = (tasks(tokenizer, of).rollout(3, 0) for of in (spec, again))
    assert [p.request for p in fresh] == [p.request for p in same]  # on policy never repeats
