"""Tell in which seconds models compute, from what actors report with their replies.

A reply says how long its model computed (`protocols.types.TimedReply`). The pool takes that to have
ended when the reply arrived. All times are seconds of `time.perf_counter` in the calling process.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

SPANS = 2**16  # that a pool keeps: those of several steps

Span = tuple[float, float]
"""Begin and end of a model's computation."""


def model_seconds(pools: Iterable[deque[Span]], begin: float, end: float) -> float:
    """Return the seconds from `begin` to `end` in which at least one model computed. The spans of
    each pool are in the order of their ends."""
    within: list[Span] = []
    for spans in pools:
        for first, last in reversed(spans):
            if last <= begin:
                break
            within.append((max(first, begin), min(last, end)))
    return busy(span for span in within if span[0] < span[1])


def busy(spans: Iterable[Span]) -> float:
    """Return the seconds that at least one of the spans covers."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
