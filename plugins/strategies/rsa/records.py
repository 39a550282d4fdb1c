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
