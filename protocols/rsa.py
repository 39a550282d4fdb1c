"""Define the records by which a run of recursive self-aggregation crosses processes.

    AggregationInput  --aggregator-->  JudgedPopulation

The aggregator judges population t - 1 and makes the prompts of population t. An AggregationInput is
the complete state of a run between two populations, so any aggregator can continue it and one that
dies loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RSAProblem:
    """Describe the problem of a run: `RSAProblem("patient_01/7", "patient_01", "what is the sodium?
    options: a) 41 mmol b) ...", {"options": ("41 mmol", ...), "correct": "41 mmol"})`.

    `document` names the document whose cartridge is the prefix. `facts` are what answers are judged
    by and depend on the kind of problem: those of a taskset hold the problem's index, {"index": 7}.
    """

    id: str
    document: str
    question: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AggregationInput:
    """Hold the run `name` before population `step`; `texts` are population step - 1, if any.

    `stream` names the random stream that draws the parents. At `step` T the last population is
    judged and no prompt follows.
    """

    name: str
    stream: str
    problem: RSAProblem
    step: int
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class JudgedCandidate:
    """Hold a text's answer, None where it gives none, and its score, 1 or more where the answer is
    right. A text that could not be judged has score None and an `error` ("environment_died: ...").
    """

    answer: str | None
    score: float | None
    error: str = ""


@dataclass(frozen=True)
class JudgedPopulation:
    """Carry the reply to an AggregationInput: `candidates` has one for each of its texts.

    `chosen` is the index of a candidate with the most frequent answer, None where no answer was
    given. `prompts` are those of population `step`, each with its `parents` among the texts.
    """

    candidates: tuple[JudgedCandidate, ...] = ()
    chosen: int | None = None
    prompts: tuple[str, ...] = ()
    parents: tuple[tuple[int, ...], ...] = ()


def shape_fault(M: int, N: int, K: int, T: int) -> tuple[str, str, str] | None:
    """Return the first of the four numbers that does not fit those before it, as (name, broken
    rule, remedy), or None where all fit. `strategies.rsa.islands` describes the numbers."""
    for name, value in (("M", M), ("N", N), ("K", K), ("T", T)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return name, "must be a whole number >= 1", "raise it"
    if M & (M - 1):
        below = 1 << (M.bit_length() - 1)
        rule = "must be a power of two, for islands merge in pairs"
        return "M", rule, f"use {below} or {2 * below}"
    if K > N:
        return "K", f"must be <= N ({N}), the candidates of an island", "lower K or raise N"
    stages = M.bit_length()
    if T % stages:
        below = T - T % stages
        rule = f"must be divisible by log2(M) + 1 = {stages}, for every stage of merging takes as "
        rule += f"many populations (M is {M})"
        return "T", rule, f"use {f'{below} or ' if below else ''}{below + stages}, or another M"
    return None
