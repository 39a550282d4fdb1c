"""Test the arms of an evaluation."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from evaluation_setup import EVAL, Reader, paper, spec, tokenizer
from transformers import AutoModelForCausalLM

from cartridge_forge.plugins.documents.study.longhealth import (
    LongHealthPrompts,
    LongHealthRecipe,
    read_patients,
)
from cartridge_forge.plugins.documents.study.question_files import UserQuestion
from cartridge_forge.plugins.evaluate.arms import ArmAnswers, EvalArm, pairs, sit
from cartridge_forge.plugins.evaluate.questions import EvalSuite, first_tokens_of
from cartridge_forge.protocols.errors import DataError, PublishError
from cartridge_forge.protocols.records.answers import Answer, to_row
from cartridge_forge.protocols.step import NO_DOCUMENT, Completion, GenerateRequest, PrefixRef


def test_a_cartridge_of_the_first_tokens_is_the_untrained_arm(sat: dict[str, ArmAnswers]) -> None:
    one, other = sat["untrained"], sat["on_policy"]
    assert one.scores == other.scores
    assert [a["answer"] for a in one.answers] == [a["answer"] for a in other.answers]
    for mine, theirs in ((one.row, other.row), *zip(one.answers, other.answers, strict=True)):
        assert numbers(mine) == pytest.approx(numbers(theirs), rel=1e-4, abs=1e-5)


def numbers(told: Any, place: str = "") -> dict[str, float]:
    """Every number of nested JSON by its place, but for what tells the arms apart."""
    if isinstance(told, int | float):
        return {place: float(told)}
    inner = told.items() if isinstance(told, dict) else enumerate(told or ())
    if isinstance(told, str):
        return {}
    return {
        at: number
        for key, value in inner
        if key not in ("step", "trained_tokens")
        for at, number in numbers(value, f"{place}/{key}").items()
    }


def test_perplexity_is_that_of_the_model_on_the_whole_text(
    exam: EvalSuite, sat: dict[str, ArmAnswers]
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(spec().learn.model.path, dtype=torch.float32)
    lost, tokens = 0.0, 0
    for item in exam.items:
        assert item.right is not None
        right = item.right
        ids = (*exam.heads[right.about], *right.prompt_ids, *right.answer_ids)
        with torch.no_grad():
            logits = plain(torch.tensor([ids])).logits[0].log_softmax(-1)
        n = len(right.answer_ids)
        at = range(len(ids) - n, len(ids))
        lost -= sum(float(logits[i - 1, ids[i]]) for i in at)
        tokens += n
    told = sat["document"].row["answers"]
    assert told["tokens"] == tokens
    assert told["value"] == pytest.approx(math.exp(lost / tokens), rel=1e-3)
    # The reader says what the chart says: the right answers are likely with it, and not without.
    assert told["value"] < 1.05 < sat["none"].row["answers"]["value"]
    passages = {name: one.row["passages"] for name, one in sat.items()}
    assert passages["document"]["value"] < passages["none"]["value"]  # type: ignore[index]


def test_the_teacher_goes_on_after_an_arm_s_own_words(exam: EvalSuite) -> None:
    """The arm without a document begins, the teacher samples, and the arm reads what it sampled:
    its loss is that of the plain model on the whole text."""
    reader, made = Reader(exam.heads, {}), {}

    async def recorded(requests: Sequence[GenerateRequest]) -> list[Completion]:
        found = await reader(requests)
        made.update({r.id: (r, c) for r, c in zip(requests, found, strict=True)})
        return found

    chosen = EVAL.model_copy(update={"own_tokens": 6})
    (told,) = asyncio.run(sit(exam, [EvalArm("none", "none", None, 1.0)], chosen, 20, recorded))
    plain = AutoModelForCausalLM.from_pretrained(spec().learn.model.path, dtype=torch.float32)
    after = told.row["after_own"]
    assert after is not None
    lost, tokens, went_on = 0.0, 0, set()
    for passage in exam.passages:
        begun = made[f"none/begins/{passage.id}"][1].token_ids
        if begun[-1] in exam.end_ids:  # it ended by itself, and nothing goes on
            continue
        went_on.add(passage.id)
        asked, more = made[f"none/goes_on/{passage.id}"]
        assert asked.prefix.name == f"document/{passage.about}"
        assert asked.prompt_ids == (*passage.prompt_ids, *begun)
        assert len(begun) == 6
        ids = (*exam.heads[NO_DOCUMENT], *passage.bare_ids, *begun, *more.token_ids)
        with torch.no_grad():
            logits = plain(torch.tensor([ids])).logits[0].log_softmax(-1)
        at = range(len(ids) - len(more.token_ids), len(ids))
        here = -sum(float(logits[i - 1, ids[i]]) for i in at)
        assert after["nll"][passage.id] == pytest.approx(here / len(more.token_ids), rel=1e-3)
        lost, tokens = lost + here, tokens + len(more.token_ids)
    assert after["nll"].keys() == went_on
    assert after["tokens"] == tokens > 0
    assert after["value"] == pytest.approx(math.exp(lost / tokens), rel=1e-3)


def test_own_texts_are_read_by_the_teacher_over_the_whole_document(exam: EvalSuite) -> None:
    """What the arm without a document writes, greedily and sampled, against the plain model."""
    reader, made = Reader(exam.heads, {}), {}

    async def recorded(requests: Sequence[GenerateRequest]) -> list[Completion]:
        completions = await reader(requests)
        made.update({r.id: c for r, c in zip(requests, completions, strict=True)})
        return completions

    chosen = EVAL.model_copy(update={"free_tokens": 12})
    whole = {n: PrefixRef(f"document/{n}", 0) for n in exam.heads if n != NO_DOCUMENT}
    arms = [EvalArm("none", "none", None, 1.0), EvalArm("document", "document", whole, 200.0)]
    bare, document = asyncio.run(sit(exam, arms, chosen, 20, recorded))
    plain = AutoModelForCausalLM.from_pretrained(spec().learn.model.path, dtype=torch.float32)
    for how in ("greedy", "sampled"):
        free = bare.row["free_running"]
        assert free is not None
        measured = free[how]  # type: ignore[literal-required]  # both keys are its own
        lost, kl, accepted, tokens = 0.0, 0.0, 0.0, 0
        for passage in exam.passages:
            text = made[f"none/own/{how}/{passage.id}"]
            n = len(text.token_ids)
            logits = []
            for head, prompt in (
                (passage.about, passage.prompt_ids), (NO_DOCUMENT, passage.bare_ids)
            ):  # fmt: skip
                ids = (*exam.heads[head], *prompt, *text.token_ids)
                with torch.no_grad():
                    rows = plain(torch.tensor([ids])).logits[0].log_softmax(-1)
                logits.append(rows[-n - 1 : -1])
            at = torch.tensor(text.token_ids)[:, None]
            teacher, own = (x.gather(1, at)[:, 0] for x in logits)
            lost -= float(teacher.sum())
            kl += float((own - teacher).sum())
            shares = (teacher - own).exp().clamp(max=1)
            if how == "greedy":
                shares = (logits[0].argmax(-1) == at[:, 0]).float()
            accepted, tokens = accepted + float(shares.sum()), tokens + n
        assert measured["tokens"] == tokens
        assert measured["teacher_nll"] == pytest.approx(lost / tokens, rel=1e-3)
        assert measured["accepted"] == pytest.approx(accepted / tokens, rel=1e-3)
        if how == "sampled":
            assert measured["kl"] == pytest.approx(kl / tokens, rel=1e-3)
    # The document's own text is accepted whole, and differs from itself by nothing.
    own = document.row["free_running"]
    assert own is not None
    assert own["sampled"] is not None
    assert own["sampled"]["accepted"] == pytest.approx(1.0, abs=1e-3)
    assert own["sampled"]["kl"] == pytest.approx(0.0, abs=1e-3)
    # Rows: four greedy answers, four sampled ones, and two texts of each passage.
    sampled = [r for r in bare.answers if r["sampled"] and "accepted" not in r]
    texts = [r for r in bare.answers if "accepted" in r]
    assert len(bare.answers) == 2 * len(exam.items) + 2 * len(exam.passages)
    assert free["accuracy"] == sum(r["right"] for r in sampled) / len(exam.items)
    assert [r["sampled"] for r in texts] == [False, False, True, True]


def test_questions_that_fit_two_documents_of_a_cartridge_are_left_out_and_counted(
    exam: EvalSuite,
) -> None:
    first = exam.items[0]
    other = next(i for i in exam.items if i.asked.document != first.asked.document)
    assert not exam.ambiguous  # each document has a cartridge of its own
    assert first.asked.choice is not None
    choice = replace(first.asked.choice, text="what is it?")
    same = [
        replace(first, asked=replace(first.asked, choice=choice)),
        replace(other, asked=replace(other.asked, choice=replace(choice, correct="another"))),
    ]
    corpus = replace(exam.about.layout, cartridges={"all": tuple(exam.about.texts)})
    together = replace(exam, items=tuple(same), about=replace(exam.about, layout=corpus, titles={}))
    assert together.ambiguous == {(q.asked.document, q.asked.id) for q in same}
    titles = {name: name for name in exam.about.texts}
    named = replace(together, about=replace(together.about, titles=titles))
    assert not named.ambiguous  # their titles tell them apart
    agreeing = [same[0], replace(same[1], asked=replace(same[1].asked, choice=choice))]
    assert not replace(together, items=tuple(agreeing)).ambiguous


def test_accuracy_is_counted_over_all_questions(
    exam: EvalSuite, sat: dict[str, ArmAnswers]
) -> None:
    for one in sat.values():
        right = [a["right"] for a in one.answers]
        assert one.row["accuracy"] == sum(right) / len(exam.items)
        assert list(one.scores) == right
        assert one.row["parse_failures"] == sum(not a["gave"] for a in one.answers)
    assert sat["document"].row["accuracy"] == sat["document"].row["exact"] == 1.0


def test_a_cut_document_is_a_whole_prompt_within_the_budget(exam: EvalSuite) -> None:
    for budget in (10, 16, 40):
        for name, ids in first_tokens_of(exam, budget, tokenizer()).items():
            whole = exam.heads[name]
            assert budget - 3 <= len(ids) <= budget
            assert ids[:-1] == whole[: len(ids) - 1]  # the document's own first tokens
            assert ids[-1] == whole[-1]  # and the template's end
    with pytest.raises(DataError, match="more than 3 tokens"):
        first_tokens_of(exam, 3, tokenizer())
    # Whoever asks for more than there is gets it all.
    assert first_tokens_of(exam, 10_000, tokenizer()) == {
        n: ids for n, ids in exam.heads.items() if n != NO_DOCUMENT
    }


def test_pairs_are_of_the_same_questions(sat: dict[str, ArmAnswers]) -> None:
    a = replace(sat["none"], scores=(0.0, 0.0, 1.0, 0.0))
    b = replace(sat["document"], scores=(1.0, 1.0, 1.0, 1.0))
    asked = [UserQuestion(str(i), name, "same?") for i, name in enumerate("pqpq")]
    (found,) = pairs([a, b], asked, EVAL)
    assert (found["a"], found["b"], found["difference"]) == ("none", "document", 0.75)
    # Document p differs by 1/2 a question and q by 1: the mean varies by sqrt(1/32), times
    # sqrt(2 / 1) for two documents, and t with one degree of freedom is 12.71: 0.75 -+ 3.2, of a
    # difference of shares.
    assert found["ci95"] == [-1.0, 1.0]
    assert found["share"] == 0.0


def test_a_request_that_is_refused_ends_the_exam(exam: EvalSuite) -> None:
    async def refusing(requests: Any) -> list[Completion]:
        return [Completion(r.id, (), (), (), "error", error="no such cartridge") for r in requests]

    with pytest.raises(PublishError, match="no such cartridge"):
        asyncio.run(sit(exam, [], EVAL, 4, refusing))


def test_questions_are_those_that_the_run_held_out(exam: EvalSuite) -> None:
    learn = spec().learn
    assert {i.asked.document for i in exam.items} == {"patient_01", "patient_02"}
    everything = paper(chosen=EVAL.model_copy(update={"questions": 1000, "probes": 500}))
    assert len(everything.items) < 2 * 6 * learn.data.questions_per_fact
    assert everything.items[:4] == exam.items
    # Probes carry their own chart, which is none of the run's.
    charts = [p.asked.text.partition(".")[0] for p in everything.probes]
    assert not {c for c in charts if any(t.startswith(c) for t in exam.about.texts.values())}
    assert {p.asked.document for p in everything.probes} == {"patient_01", "patient_02"}
    placed = [p.text for p in everything.placed]
    assert not any("options" in text for text in placed)
    assert len(placed) == len(everything.items) / learn.data.questions_per_fact  # each fact once
    assert exam.placed[0].place == f"held-out questions: {exam.items[0].asked.id}"


def test_passages_are_the_documents_own_words_from_a_sentence_on(exam: EvalSuite) -> None:
    everything = paper(chosen=EVAL.model_copy(update={"passages": 50, "passage_tokens": 9}))
    assert len({r.id for r in everything.passages}) == len(everything.passages) > 10
    for reading in everything.passages:
        words = exam.about.conversation.decode(reading.answer_ids).strip()
        text = exam.about.texts[reading.about]
        assert words in text
        before = text[: text.index(words)].rstrip()
        assert not before or before[-1] in ".:"


def test_a_run_and_the_evaluation_keep_the_same_answers(
    exam: EvalSuite, sat: dict[str, ArmAnswers]
) -> None:
    """Of the same prefix, by ids, hashes, texts and losses; and the loss is that of the row."""
    learn = spec(f"evaluate.questions={len(exam.items)}").learn
    tasks = LongHealthPrompts(learn, read_patients(learn.data), tokenizer())
    ask = Reader(tasks.documents, {})

    async def generate(requests: Any, replied: Any = None, /) -> Any:
        return await ask(requests)

    kept: list[Answer] = []
    for sampled in (False, True):
        recipe = LongHealthRecipe(tasks, measured=True)
        measured = asyncio.run(
            recipe.measure(
                "document", "document", 0, most=None, sampled=sampled, generate=generate,
                keep=kept.extend,
            )
        )  # fmt: skip
        assert measured["n"] == len(exam.items)
    greedy, drawn = kept[: len(exam.items)], kept[len(exam.items) :]
    assert {a.nll for a in drawn} == {None}
    for mine, theirs in zip(greedy, sat["document"].answers, strict=True):
        row = to_row(mine, "document", 0, sampled=False)
        assert row.pop("nll") == pytest.approx(theirs["nll"], rel=1e-5)
        assert row == {key: theirs[key] for key in row}
    tokens = [len(item.right.answer_ids) for item in exam.items if item.right]
    lost = sum(n * (a.nll or 0.0) for n, a in zip(tokens, greedy, strict=True))
    whole = sat["document"].row["answers"]
    assert math.exp(lost / sum(tokens)) == pytest.approx(whole["value"], rel=1e-5)


def test_the_teacher_agrees_with_itself_and_no_prefix_forgets_nothing(
    sat: dict[str, ArmAnswers],
) -> None:
    teacher = sat["document"].row["teacher"]
    assert (teacher["kl"], teacher["top1"]) == (pytest.approx(0.0, abs=1e-5), 1.0)
    bare = sat["none"].row["forgetting"]
    assert bare is not None
    assert (bare["kl"], bare["top1"]) == (pytest.approx(0.0, abs=1e-5), 1.0)
    assert bare["perplexity_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert bare["accuracy"] == bare["accuracy_without"]
    assert sat["none"].row["compression"] is None
    assert sat["on_policy"].row["teacher"]["kl"] > 0.01
