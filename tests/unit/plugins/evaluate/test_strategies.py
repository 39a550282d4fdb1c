"""Arms over scripted answers: accuracies, gains and what was spent, counted by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from math import sqrt

import pytest

from cartridge_forge.plugins.clinic.findings import FindingsQuestion
from cartridge_forge.plugins.clinic.text import Patient
from cartridge_forge.plugins.evaluate.spec import FrontierArm, FrontierSpec
from cartridge_forge.plugins.evaluate.strategies import (
    ArmRow,
    FrontierQuestion,
    compare,
    findings_answer,
)
from cartridge_forge.plugins.spec_files.loading import load_file
from cartridge_forge.plugins.statistics.intervals import student_t95, wilson_interval
from cartridge_forge.plugins.strategies.catalog import parse
from cartridge_forge.plugins.strategies.samplers.sampler import (
    ABILITIES,
    AlternatingSampler,
    SampleRequest,
    SampleResult,
)
from cartridge_forge.protocols.errors import DataError, SpecError
from cartridge_forge.protocols.records.answers import Answer

# What the samples 0, 1, 2 say of each question; all are asked with the right answer "cyst".
SAYS = {
    "q/0": ("cyst", "cyst", "ulcer"),
    "q/1": ("ulcer", "cyst", "cyst"),
    "q/2": ("ulcer", "cyst", "cyst"),
    "q/3": ("", "normal", "normal"),
}


class Scripted:
    """Says what the ask's name is to get; of a document, so that prefixes are told apart."""

    abilities = ABILITIES

    def __init__(self, document: str, calls: list[tuple[str, list[str]]]) -> None:
        self.document, self.calls = document, calls

    async def __call__(self, asks: Sequence[SampleRequest]) -> list[SampleResult]:
        self.calls.append((self.document, [a.id for a in asks]))
        found = []
        for ask in asks:
            question, _, sample = ask.id.rpartition("/")
            word = SAYS[question][int(sample)]
            text = f"the answer is {word}." if word else "no idea"
            found.append(SampleResult(text, len(text.split()), 7, "stop"))
        return found


def judged(text: str, tokens: int) -> Answer:
    answer = text.removeprefix("the answer is ").strip(".") if "answer" in text else None
    right = float(answer == "cyst")
    return Answer(
        id="q", fact="which?", document="p", document_hash="", question_hash="", text=text,
        answer=answer, expected="cyst", right=right, tokens=tokens,
    )  # fmt: skip


EXAMS = [
    FrontierQuestion(name, (f"p{i % 2}",), "which? options", judged) for i, name in enumerate(SAYS)
]


def rows(*arms: FrontierArm, questions: int = 4) -> tuple[list[ArmRow], list[tuple]]:
    calls: list[tuple[str, list[str]]] = []
    spec = FrontierSpec(questions=questions, arms=arms)
    shown: list[ArmRow] = []
    exams = EXAMS[:questions]
    found = asyncio.run(compare(spec, exams, lambda d: Scripted(d[0], calls), shown.append))
    assert shown == found
    return found, calls


ONE = FrontierArm(strategy="chain_of_thought")
THREE = FrontierArm(strategy="self_consistency", options={"samples": 3})


def test_arms_are_counted_by_hand() -> None:
    (one, three), calls = rows(ONE, THREE)
    assert (one.accuracy, one.ci95, one.n, one.unparsed) == (0.25, wilson_interval(1, 4), 4, 1)
    assert (one.gain, one.gain_ci95) == (None, None)
    assert (one.tokens, one.prompt_tokens, one.calls) == ((4 + 4 + 4 + 2) / 4, 7, 1)
    assert (three.name, three.accuracy, three.unparsed) == ("self_consistency samples=3", 0.75, 0)
    # Question by question 0, 1, 1, 0 more: mean 1/2, deviation 1/sqrt(3).
    assert three.gain == 0.5
    half = student_t95(3) / sqrt(3) / sqrt(4)
    assert three.gain_ci95 == (pytest.approx(0.5 - half), 1.0)  # 1.4 is no difference of shares
    assert (three.prompt_tokens, three.calls) == (21, 1)
    assert 0 <= one.latency <= one.seconds
    # Every question over its own document, and arms share the samples that they have in common.
    assert calls[:4] == [(f"p{i % 2}", [f"q/{i}/0"]) for i in range(4)]
    assert calls[4:] == [(f"p{i % 2}", [f"q/{i}/{s}" for s in range(3)]) for i in range(4)]


def test_a_budget_and_fewer_questions() -> None:
    (row,), _ = rows(THREE.model_copy(update={"budget": 2}), questions=1)
    assert (row.n, row.tokens, row.accuracy) == (1, 0, 0.0)  # no token for each of three
    assert row.name.endswith("budget=2")


def test_wrong_arms_are_refused_before_anything_is_sampled() -> None:
    for arm in (FrontierArm(strategy="guess"), FrontierArm(strategy="rsa", options={"Q": 1})):
        with pytest.raises(DataError):
            rows(ONE, arm)


def test_the_shipped_arms_are_strategies_and_an_arm_is_listed_once(tmp_path) -> None:
    from cartridge_forge.forge_run.commands.frontier import ARMS

    shipped = load_file(FrontierSpec, ARMS)
    for arm in shipped.arms:
        parse(arm.strategy, arm.options)
    assert {arm.strategy for arm in shipped.arms} >= {
        "chain_of_thought", "self_consistency", "deepconf", "best_of_n", "beam_search",
        "phi_decoding", "adaptive_scaling", "rsa",
    }  # fmt: skip
    file = tmp_path / "twice.yaml"
    file.write_text("arms:\n  - {strategy: rsa}\n  - {strategy: rsa}\n")
    with pytest.raises(SpecError, match=r"each arm once.*\n?.*twice\.yaml:1"):
        load_file(FrontierSpec, file)


RIGHT = {"sodium": "41 mmol", "ecg": "normal"}
WHOLE, HALF = "the answer is sodium 41 mmol, ecg normal.", "the answer is ecg normal."


class Lists(Scripted):
    """Says half of the answer in every sample but the first to the question "a"."""

    async def __call__(self, asks: Sequence[SampleRequest]) -> list[SampleResult]:
        texts = [WHOLE if ask.id == "a/0" else HALF for ask in asks]
        return [SampleResult(text, len(text.split()), 7, "stop") for text in texts]


def test_questions_of_several_parts_have_their_f1() -> None:
    """One sample answers "a" as a whole and of "b" a half: F1 1 and 2/3. A vote over three whole
    answers loses what the first sample of "a" had; a vote over each part keeps it."""
    patient = Patient("p", "anna weber", "14 march", "asthma", ("sodium 41 mmol.",), ())
    asked = FindingsQuestion("q", ("p",), RIGHT)
    exams = [
        FrontierQuestion(
            name, ("p",), asked.text, partial(findings_answer, asked, (patient,), ("p",))
        )
        for name in ("a", "b")
    ]
    arms = (ONE, THREE, FrontierArm(strategy="part_vote", options={"samples": 3}))
    spec = FrontierSpec(parts=2, arms=arms)
    kept: list[Answer] = []
    found = asyncio.run(
        compare(spec, exams, lambda d: Lists(d[0], []), keep=lambda row, own: kept.extend(own))
    )
    assert [(row.accuracy, row.f1) for row in found] == [
        (0.5, pytest.approx(5 / 6)), (0.0, pytest.approx(2 / 3)), (0.5, pytest.approx(5 / 6)),
    ]  # fmt: skip
    assert [row.tokens for row in found] == [6.5, 16.5, 16.5]
    first = kept[0]
    assert (first.answer, first.expected) == ("sodium 41 mmol, ecg normal",) * 2
    assert (first.right, kept[1].right, kept[1].answer) == (1.0, 0.0, "ecg normal")


class Half(Scripted):
    """Knows the part of its own chart, and gives the other a value of its own."""

    async def __call__(self, asks: Sequence[SampleRequest]) -> list[SampleResult]:
        self.calls.append((self.document, [a.id for a in asks]))
        said = {
            "a": "the answer is sodium 41 mmol, ecg cyst.",
            "b": "the answer is sodium 9 mmol, ecg normal.",
        }[self.document]
        return [SampleResult(said, 7, 7, "stop") for _ in asks]


def test_a_question_of_two_charts_is_sampled_over_their_cartridges_in_turn() -> None:
    """Of three samples two are over the first chart, so its values lead in the vote over parts."""
    patients = tuple(
        Patient(name, "anna weber", "14 march", "asthma", ("a note.",), ()) for name in "ab"
    )
    asked = FindingsQuestion("q", ("a", "b"), RIGHT)
    record = partial(findings_answer, asked, patients, ("a", "b"))
    exam = FrontierQuestion("q", ("a", "b"), asked.text, record)
    arms = (THREE, FrontierArm(strategy="part_vote", options={"samples": 3}))
    calls: list[tuple[str, list[str]]] = []
    kept: list[Answer] = []

    def over(documents: tuple[str, ...]) -> AlternatingSampler:
        return AlternatingSampler([Half(name, calls) for name in documents])

    asyncio.run(
        compare(
            FrontierSpec(parts=2, charts=2, arms=arms), [exam], over,
            keep=lambda row, own: kept.extend(own),
        )
    )  # fmt: skip
    assert calls == 2 * [("a", ["q/0", "q/2"]), ("b", ["q/1"])]
    assert [a.answer for a in kept] == ["sodium 41 mmol, ecg cyst"] * 2
    assert (kept[0].document, kept[0].cartridge, kept[0].right) == ("a+b", "a+b", 0.0)


def test_charts_divide_the_parts_of_a_question() -> None:
    with pytest.raises(ValueError, match="charts must divide parts: 2 and 3; set parts to a mult"):
        FrontierSpec(parts=3, charts=2, arms=(ONE,))
