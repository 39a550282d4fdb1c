"""Tell in which seconds models and environments work, from what actors report with their replies.

A reply says how long its actor worked (`protocols.types.TimedReply`). The pool takes that to have
ended when the reply arrived. All times are seconds of `time.perf_counter` in the calling process.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SPANS = 2**16  # that a pool keeps: those of several steps

Span = tuple[float, float]
"""Begin and end of an actor's work."""

ENVIRONMENTS = ("environment", "reward")  # the roles whose work is the task's own, not a model's


@dataclass(frozen=True)
class WorkTime:
    """Hold seconds of a step: those in which a model computed, and those in which only an
    environment or a reward worked."""

    model: float = 0.0
    environment: float = 0.0


def work_time(pools: Mapping[str, deque[Span]], begin: float, end: float) -> WorkTime:
    """Return what worked from `begin` to `end`, from the spans of each role's pool, which are in
    the order of their ends."""
    models: list[Span] = []
    environments: list[Span] = []
    for role, spans in pools.items():
        within = environments if role in ENVIRONMENTS else models
        for first, last in reversed(spans):
            if last <= begin:
                break
            if first < end:
                within.append((max(first, begin), min(last, end)))
    model = busy(models)
    return WorkTime(model, busy(models + environments) - model)


def busy(spans: Iterable[Span]) -> float:
    """Return the seconds that at least one of the spans covers."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
