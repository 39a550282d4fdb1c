"""Runs of recursive self-aggregation as they cross processes.

    Standing  --aggregator-->  Judged     what population t - 1 is worth, and what t is asked

A Standing is all that there is to know of a run between two populations: whoever gets it can go on
with it, so an aggregator that dies loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RSAProblem:
    """What a run is about: `RSAProblem("patient_01/7", "patient_01", "what is the sodium? options:
    a) 41 mmol b) ...", {"options": ("41 mmol", ...), "correct": "41 mmol"})`.

    `document` is whose cartridge stands before it. `facts` are what its answers are judged by,
    those of its kind: a taskset's problems have their place in it, {"index": 7}.
    """

    id: str
    document: str
    question: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AggregationInput:
    """The run `name` before population `step`; `texts` are population step - 1, empty at step 0.

    `stream` names the draw of its parents. At `step` T nothing more is asked: the last population
    is judged.
    """

    name: str
    stream: str
    problem: RSAProblem
    step: int
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class JudgedCandidate:
    """A judged text: its answer, None where it gives none, and its score, 1 or more where that is
    right. A text that could not be judged has score None and says why ("environment_died: ...")."""

    answer: str | None
    score: float | None
    error: str = ""


@dataclass(frozen=True)
class JudgedPopulation:
    """What an aggregator makes of a Standing; `candidates` has an entry for each of its texts.

    `chosen` is the one that speaks for the answer that most gave, None where none was given.
    `prompts` are those of population `step`, each with its `parents` among the texts.
    """

    candidates: tuple[JudgedCandidate, ...] = ()
    chosen: int | None = None
    prompts: tuple[str, ...] = ()
    parents: tuple[tuple[int, ...], ...] = ()


def shape_fault(M: int, N: int, K: int, T: int) -> tuple[str, str, str] | None:
    """The first of the four numbers that does not go with those before: its name, the rule that it
    breaks and the remedy; None where all go together. What they do: `strategies.rsa.islands`."""
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
