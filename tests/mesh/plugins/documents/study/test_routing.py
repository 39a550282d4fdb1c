"""The router on held-out questions: what is counted, and what is sampled anew."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cartridge_forge.plugins.clinic.text import Patient, PatientQuestion, right_answer
from cartridge_forge.plugins.documents.study.longhealth import LongHealthPrompts, LongHealthRecipe
from cartridge_forge.plugins.documents.study.routing import RememberedAnswers, RoutedQuestions
from cartridge_forge.plugins.statistics.intervals import wilson_interval
from cartridge_forge.protocols.records.answers import Answer
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef, Sampling
from models.pretrain.tokenizer import build_tokenizer

TEXTS = {"ada": ["Ada has a cyst."], "bo": ["Bo has an ulcer.", "Bo sleeps."]}


def test_each_question_counts_once_and_only_its_own_cartridge_is_right() -> None:
    routing = RoutedQuestions(TEXTS)
    for _ in range(2):
        assert routing.own("ada", "Is Ada well?") == "ada"
        assert routing.own("ada", "Does Bo sleep?") == "ada"
        assert routing.own("bo", "Zebra?") == "bo"
    assert routing.chosen("ada", "Does Bo sleep?") == "bo"
    assert routing.chosen("bo", "Zebra?") == "ada"  # the first by name
    assert routing.accuracy == {
        "accuracy": pytest.approx(1 / 3), "ci95": list(wilson_interval(1, 3)), "n": 3,
    }  # fmt: skip
    assert routing.terms["bo"] == [{"an": 1, "bo": 1, "has": 1, "ulcer": 1}, {"bo": 1, "sleeps": 1}]


def test_a_single_cartridge_is_always_right_and_that_is_no_news() -> None:
    routing = RoutedQuestions({"ada": TEXTS["ada"]})
    routing.own("ada", "Ada?")
    assert routing.accuracy is None
    assert RoutedQuestions(TEXTS).accuracy is None


class Engine:
    """A generator of which every request is kept; it says the id of the prefix."""

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []

    async def __call__(
        self, requests: Sequence[GenerateRequest], replied: object = None, /, **settings: bool
    ) -> list[Completion]:
        self.asked += requests
        made = [Completion(r.id, r.prompt_ids, (), (), "stop") for r in requests]
        return made


def test_only_what_was_not_asked_before_is_sampled() -> None:
    async def scenario() -> None:
        engine = Engine()
        answers = RememberedAnswers(engine)
        first = GenerateRequest("a/1", (7,), PrefixRef("cartridge/ada", 3), Sampling(), 5)
        moved = replace(first, id="b/1", prefix=PrefixRef("cartridge/bo", 3))
        made = await answers([first])
        assert [c.request_id for c in made] == ["a/1"]
        made = await answers([moved, replace(first, id="b/2"), replace(first, id="b/3")])
        assert [c.request_id for c in made] == ["b/1", "b/2", "b/3"]
        assert [c.token_ids for c in made] == [(7,)] * 3
        assert [r.id for r in engine.asked] == ["a/1", "b/1"]

    asyncio.run(scenario())


def clinic() -> list[Patient]:
    """Two patients with two questions each, of which one does not say whom it is about."""
    found = []
    for name, (sick, other) in {"ada": ("cyst", "ulcer"), "bo": ("ulcer", "cyst")}.items():
        options = (sick, other, "fracture", "stenosis", "normal")
        texts = (f"what has {name} ?", "what is the finding ?")
        questions = [
            PatientQuestion(f"{name}/{i}", name, t, options, sick) for i, t in enumerate(texts)
        ]
        found.append(Patient(name, name, "", "", (f"{name} has a {sick} .",), tuple(questions)))
    return found


def test_the_arm_routed_asks_the_routers_cartridge() -> None:
    spec = LearnSpec.read(
        {
            "model": {"path": "tiny"},
            "data": {"patients": 2, "facts": 12, "notes": 2, "held_out": 1.0},
            "cartridge": {"tokens": 8},
            "rollout": {"prompts": 2, "max_tokens": 24},
            "train": {"steps": 4, "row_tokens": 128},
        }
    )  # fmt: skip
    prompts = LongHealthPrompts(spec, clinic(), build_tokenizer())
    recipe = LongHealthRecipe(prompts, measured=True)
    assert recipe.texts == {p.id: (p.document,) for p in clinic()}
    first = [e.question.text for e in prompts.exams if e.question.patient == clinic()[0].id]
    assert recipe.question == first[0], "for the printed command, which asks the first cartridge"
    routing, engine = RoutedQuestions(recipe.texts), Engine()
    kept: list[Sequence[Answer]] = []

    async def knows(
        requests: Sequence[GenerateRequest], replied: object = None, /, **settings: bool
    ) -> list[Completion]:
        """Answer rightly over the own cartridge, and not at all over another."""
        asked = {e.question.id: e.question for e in prompts.exams}
        engine.asked += requests
        made = []
        for r in requests:
            question = asked["/".join(r.id.removesuffix("/read").split("/")[-2:])]
            own = r.prefix.name == f"cartridge/{question.patient}"
            ids = (
                prompts.conversation.saying(right_answer(question, question.text)) if own else (2,)
            )
            made.append(Completion(r.id, ids, (), (), "stop", prompt_logprobs=(-1.0,) * 99))
        return made

    async def measured(arm: str) -> float:
        route = routing.own if arm == "on_policy" else routing.chosen
        result = await recipe.measure(
            arm, "cartridge", 4, most=None, sampled=False, generate=answers, keep=kept.append,
            route=route,
        )  # fmt: skip
        return result["accuracy"]

    answers = RememberedAnswers(knows)
    assert asyncio.run(measured("on_policy")) == 1.0
    first = len(engine.asked)
    # Options name both findings, so "what is the finding" fits both charts alike: ties go to ada.
    assert asyncio.run(measured("routed")) == 0.75
    assert routing.accuracy is not None
    assert routing.accuracy["accuracy"] == 0.75
    again = [(r.id, r.prefix.name) for r in engine.asked[first:]]
    assert again == [
        ("evaluate/routed/bo/1", "cartridge/ada"), ("evaluate/routed/bo/1/read", "cartridge/ada"),
    ]  # fmt: skip
    assert [[a.document for a in answers] for answers in kept] == [["ada", "bo"] * 2] * 2
    chosen = [[a.cartridge for a in answers] for answers in kept]
    assert chosen == [["ada", "bo"] * 2, ["ada", "bo", "ada", "ada"]]
