"""Samplers that say what a script tells them, for runs of recursive self-aggregation."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from cartridge_forge.plugins.strategies.rsa.engine import RSAEngine
from cartridge_forge.plugins.strategies.samplers.sampler import Ability, SampleRequest, SampleResult

Script = Callable[
    [SampleRequest, list[str]], str
]  # the ask, the candidates that it shows -> a response
_ATTEMPT = re.compile(r"^Attempt \d+:\n(.*?)(?=^Attempt \d+:|^Write the improved)", re.M | re.S)


def shown(ask: SampleRequest) -> list[str]:
    """The candidates that an ask wants aggregated, in order; none at step 0."""
    return [found.strip() for found in _ATTEMPT.findall(ask.messages[-1].content)]


class Scripted:
    """A sampler, and every batch that it was asked for. A response takes all that it may, or
    `length` tokens if that is less."""

    def __init__(self, script: Script, length: int = 10) -> None:
        self.batches: list[list[SampleRequest]] = []
        self._script, self._length = script, length

    @property
    def abilities(self) -> frozenset[Ability]:
        return frozenset({"seed"})

    async def __call__(self, asks: Sequence[SampleRequest]) -> list[SampleResult]:
        self.batches.append(list(asks))
        return [self._answer(ask) for ask in asks]

    def _answer(self, ask: SampleRequest) -> SampleResult:
        tokens = min(self._length, ask.sampling.max_tokens)
        return SampleResult(
            self._script(ask, shown(ask)), tokens, 3, "stop", token_ids=(1,) * tokens
        )


def place(ask: SampleRequest) -> tuple[int, int, int]:
    """Question, step and slot of an ask."""
    question, step, slot = map(int, ask.id.split("/"))
    return question, step, slot


RIGHT, WRONG = r"so \boxed{1}", r"so \boxed{0}"


def scored(question: str, text: str) -> float:
    """Score 1 for what is right."""
    return float(RIGHT in text)


def begun(ask: SampleRequest, right: int) -> str:
    """Step 0: the first `right` slots know it."""
    return RIGHT if place(ask)[2] < right else WRONG


def majority_copier(right: int) -> Scripted:
    """An aggregator that says what most of its candidates say."""

    def say(ask: SampleRequest, shown: list[str]) -> str:
        return max(shown, key=shown.count) if shown else begun(ask, right)

    return Scripted(say)


def accuracies(sampler: Scripted, questions: int = 1, **numbers: int) -> list[float]:
    """Mean accuracy of each population, over all questions."""
    engine = RSAEngine(sampler, **numbers, scorer=scored, seed=3)
    runs = engine.run([f"question {q}" for q in range(questions)]).runs
    steps = zip(*(r.populations for r in runs), strict=True)
    return [sum(sum(p.scores) for p in step) / (questions * len(step[0].scores)) for step in steps]
