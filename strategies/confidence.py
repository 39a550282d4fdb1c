"""Compute DeepConf's confidence (Fu et al. 2025) from log-probabilities; higher is surer.

token    c_i = -mean of the top-k log-probabilities at position i
group    mean of c over each window of w tokens; a shorter trace is one group
trace    mean           over all tokens
         tail           over the last w tokens
         lowest_group   the least sure group
         lowest_tenth   mean of the least sure 10% of the groups, at least one
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean
from typing import Literal

Measure = Literal["mean", "tail", "lowest_group", "lowest_tenth"]


def token_confidences(top_logprobs: Sequence[Sequence[tuple[str, float]]], k: int) -> list[float]:
    """Return each token's confidence in nats, over at most `k` log-probabilities."""
    return [-fmean(logprob for _, logprob in place[:k]) for place in top_logprobs]


def group_confidences(confidences: Sequence[float], window: int) -> list[float]:
    """Return the mean of each window of `window` tokens, in order; of all tokens if fewer.

    `group_confidences([1, 2, 3, 6], 3)` is [2, 3 2/3].
    """
    if len(confidences) < window:
        return [fmean(confidences)] if confidences else []
    sums = [0.0, *accumulate(confidences)]
    return [(sums[i + window] - sums[i]) / window for i in range(len(confidences) - window + 1)]


def trace_confidence(confidences: Sequence[float], measure: Measure, window: int) -> float:
    """Return the confidence of a whole trace, in nats; 0 for one without tokens."""
    if not confidences:
        return 0.0
    if measure == "mean":
        return fmean(confidences)
    if measure == "tail":
        return fmean(confidences[-window:])
    groups = sorted(group_confidences(confidences, window))
    if measure == "lowest_group":
        return groups[0]
    return math.fsum(lowest := groups[: max(len(groups) // 10, 1)]) / len(lowest)
