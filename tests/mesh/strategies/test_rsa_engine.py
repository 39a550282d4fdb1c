"""Whole runs of recursive self-aggregation, over samplers that follow a script."""

from __future__ import annotations

from math import comb

from rsa_setup import Scripted, place

from protocols.records.intervals import wilson_interval
from strategies.rsa.engine import RSAEngine
from strategies.samplers.sampler import SampleRequest

RIGHT, WRONG = r"so \boxed{1}", r"so \boxed{0}"


def scored(question: str, text: str) -> float:
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


def test_a_copier_of_the_majority_drifts_from_below_a_half_down_and_from_above_up() -> None:
    """One step by the hypergeometric formula; a leak of the right answers would lift the first."""
    n, right, questions = 16, 6, 60
    found = accuracies(majority_copier(right), questions, N=n, K=3, T=6)
    pairs = comb(right, 2) * (n - right) + comb(right, 3)
    low, high = wilson_interval(round(found[1] * questions * n), questions * n)
    assert low <= pairs / comb(n, 3) <= high
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0] / 2
    risen = accuracies(majority_copier(n - right), questions, N=n, K=3, T=6)
    assert risen == sorted(risen)
    assert risen[-1] > 1 - found[0] / 2
