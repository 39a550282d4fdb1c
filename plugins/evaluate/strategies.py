"""Compare strategies by accuracy and compute, over the same cartridges and held-out questions.

arm      strategy, options, budget
for each every question at once, each over its documents' prefixes -> answers, tokens, calls
row      accuracy with its interval, gain over the first arm question by question, compute spent
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from cartridge_forge.plugins.clinic.findings import answer_parts, parts_f1
from cartridge_forge.plugins.evaluate.frontier_questions import FrontierQuestion
from cartridge_forge.plugins.evaluate.spec import FrontierArm, FrontierSpec
from cartridge_forge.plugins.statistics.intervals import mean_interval, wilson_interval
from cartridge_forge.plugins.strategies.catalog import Strategy, parse, run
from cartridge_forge.plugins.strategies.problem import Judge, StrategyResult
from cartridge_forge.plugins.strategies.samplers.sampler import Sampler
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.records.answers import Answer
from cartridge_forge.protocols.teacher_replay import AgentMessage

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
        gain_ci95=None if gains is None else mean_interval(gains),
        f1=fmean(map(_f1, answers)) if parts > 1 else None,
    )


def _f1(answer: Answer) -> float:
    return parts_f1(answer_parts(answer.expected or ""), answer_parts(answer.answer or ""))
