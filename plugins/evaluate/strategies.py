"""Compare strategies by accuracy and compute, over the same cartridges and held-out questions.

arm      strategy, options, budget
for each every question at once, each over its documents' prefixes -> answers, tokens, calls
row      accuracy with its interval, gain over the first arm question by question, compute spent

Its questions:

options    a run's held-out option questions, right by their letter or its text
findings   questions of several fields of one or more charts of the embedded clinic, right if all
           are
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.rollouts import hash_of
from cartridge_forge.plugins.clinic.findings import (
    FindingsQuestion,
    all_right,
    answer_parts,
    draw_findings,
    part_list,
    parts_f1,
    said_parts,
)
from cartridge_forge.plugins.clinic.text import Patient
from cartridge_forge.plugins.documents.study.longhealth import LongHealthPrompts, LongHealthQuestion
from cartridge_forge.plugins.evaluate.spec import FrontierArm, FrontierSpec
from cartridge_forge.plugins.statistics.intervals import (
    SHARE_DIFFERENCE,
    mean_interval,
    wilson_interval,
)
from cartridge_forge.plugins.strategies.catalog import Strategy, parse, run
from cartridge_forge.plugins.strategies.problem import Judge, StrategyResult
from cartridge_forge.plugins.strategies.samplers.sampler import Sampler
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.records.answers import Answer
from cartridge_forge.training.records import interleave, with_title


@dataclass(frozen=True)
class FrontierQuestion:
    """Hold a question about `documents` as every arm is asked it. `record(text, tokens)` returns
    the record of an answer, judged."""

    id: str
    documents: tuple[str, ...]
    text: str
    record: Callable[[str, int], Answer]


def option_questions(tasks: LongHealthPrompts, most: int) -> list[FrontierQuestion]:
    """Return the first `most` of a run's held-out option questions."""

    def record(exam: LongHealthQuestion, text: str, tokens: int) -> Answer:
        (answer,) = tasks.answers([exam], [text], [tokens])
        return answer

    return [
        FrontierQuestion(e.question.id, (e.question.patient,), e.text, partial(record, e))
        for e in tasks.exams[:most]
    ]


def findings_questions(
    tasks: LongHealthPrompts, parts: int, charts: int, count: int, seed: int
) -> list[FrontierQuestion]:
    """Return `count` questions of `parts` fields of `charts` patients each, one group of patients
    after another. Raises DataError for charts that are too few, have too few facts, or are not the
    embedded clinic's."""
    patients = [patient for _, patient in sorted(tasks.patients.items())]
    if len(patients) < charts:
        raise DataError(
            f"questions of {charts} charts need as many: the run has {len(patients)}; lower "
            "frontier.charts, or raise data.patients"
        )
    starts = range(0, len(patients) - charts + 1, charts)
    each = -(-count // len(starts))
    rows = [
        [(group, question) for question in draw_findings(group, parts, each, seed)]
        for group in (patients[start : start + charts] for start in starts)
    ]
    found = []
    for group, question in interleave(rows)[:count]:
        # A name leads a reader of one chart; a question of several names none of them.
        text = (
            with_title(tasks.titles, group[0].id, question.text) if charts == 1 else question.text
        )
        cartridges = [tasks.layout.cartridge_of(patient.id) for patient in group]
        record = partial(findings_answer, question, group, cartridges)
        found.append(FrontierQuestion(question.id, question.patients, text, record))
    return found


def findings_answer(
    question: FindingsQuestion,
    patients: Sequence[Patient],
    cartridges: Sequence[str],
    text: str,
    tokens: int,
) -> Answer:
    """Return the record of a response; its answer is the list of the parts that it gives."""
    said = said_parts(text)
    return Answer(
        id=question.id, fact=question.text, document="+".join(question.patients),
        document_hash=hash_of(*(patient.document for patient in patients)),
        question_hash=hash_of(question.text, question.correct), text=text,
        answer=part_list(said) or None, expected=question.correct,
        right=float(all_right(question.parts, said)), tokens=tokens,
        cartridge="+".join(cartridges),
    )  # fmt: skip


AT_ONCE = 32  # questions: more would wait in the engines until their calls time out


@dataclass(frozen=True)
class ArmRow:
    """Hold the results of one arm. Tokens and calls are means a question. `latency` is the mean
    wall time of a question beside all others, `seconds` the wall time of the arm. `gain` is the
    mean over questions of being right minus the first arm's (None: the first), with Student's t
    interval. `f1` is the mean F1 of the parts (None: questions of one part)."""

    name: str
    strategy: str
    accuracy: float
    ci95: tuple[float, float]
    n: int
    unparsed: int
    tokens: float
    prompt_tokens: float
    calls: float
    latency: float
    seconds: float
    gain: float | None = None
    gain_ci95: tuple[float, float] | None = None
    f1: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


async def compare(
    spec: FrontierSpec,
    questions: Sequence[FrontierQuestion],
    sampler_of: Callable[[tuple[str, ...]], Sampler],
    show: Callable[[ArmRow], None] = lambda row: None,
    keep: Callable[[ArmRow, Sequence[Answer]], None] = lambda row, answers: None,
    judge: Judge | None = None,
) -> list[ArmRow]:
    """Return a row for every arm, in order. `sampler_of(documents)` samples over their prefixes;
    `keep` gets every arm's answers, question by question; `judge` serves the scorer process_reward.

    Raises DataError for an unknown strategy or option, before anything is sampled.
    """
    strategies = [parse(arm.strategy, arm.options) for arm in spec.arms]
    if judge is None and any(getattr(s, "scorer", "") == "process_reward" for s in strategies):
        raise DataError(
            "an arm has the scorer process_reward, and nothing is configured for it; add "
            "process_reward to the file of the arms"
        )
    rows: list[ArmRow] = []
    first: list[bool] | None = None
    for arm, strategy in zip(spec.arms, strategies, strict=True):
        start, places = time.perf_counter(), asyncio.Semaphore(AT_ONCE)
        results = await asyncio.gather(
            *(
                _solve(strategy, arm, spec, question, sampler_of, places, judge)
                for question in questions
            )
        )
        seconds = time.perf_counter() - start
        answers = [
            question.record(r.text, r.spent.tokens)
            for question, r in zip(questions, results, strict=True)
        ]
        rows.append(_row(arm, results, answers, spec.parts, seconds, first))
        first = first or [a.right == 1 for a in answers]
        show(rows[-1])
        keep(rows[-1], answers)
    return rows


async def _solve(
    strategy: Strategy,
    arm: FrontierArm,
    spec: FrontierSpec,
    question: FrontierQuestion,
    sampler_of: Callable[[tuple[str, ...]], Sampler],
    places: asyncio.Semaphore,
    judge: Judge | None,
) -> StrategyResult:
    async with places:
        return await run(
            strategy,
            sampler_of(question.documents),
            (AgentMessage("user", question.text),),
            form="clinic",
            seed=spec.seed,
            max_tokens=spec.max_tokens,
            temperature=spec.temperature,
            budget=arm.budget,
            # Draws depend on the question alone, so arms share their common samples.
            name=question.id,
            judge=judge,
        )


def _row(
    arm: FrontierArm,
    results: Sequence[StrategyResult],
    answers: Sequence[Answer],
    parts: int,
    seconds: float,
    first: Sequence[bool] | None,
) -> ArmRow:
    right = [a.right == 1 for a in answers]
    gains = None if first is None else [float(a) - b for a, b in zip(right, first, strict=True)]
    return ArmRow(
        name=arm.name,
        strategy=arm.strategy,
        accuracy=fmean(right),
        ci95=wilson_interval(sum(right), len(right)),
        n=len(right),
        unparsed=sum(a.answer is None for a in answers),
        tokens=fmean(r.spent.tokens for r in results),
        prompt_tokens=fmean(r.spent.prompt_tokens for r in results),
        calls=fmean(r.spent.calls for r in results),
        latency=fmean(r.spent.seconds for r in results),
        seconds=seconds,
        gain=None if gains is None else fmean(gains),
        gain_ci95=None if gains is None else mean_interval(gains, SHARE_DIFFERENCE),
        f1=fmean(map(_f1, answers)) if parts > 1 else None,
    )


def _f1(answer: Answer) -> float:
    return parts_f1(answer_parts(answer.expected or ""), answer_parts(answer.answer or ""))
