"""Compute confidence intervals: of a share (k right answers of n), of a mean over a few seeds, and
of the difference of two arms that answered the same questions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import atan, ceil, cos, pi, sin, sqrt, tan
from operator import sub
from statistics import fmean, stdev

Z95 = 1.959963984540054  # the 97.5% quantile of the standard normal distribution


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Return the 95% score interval of Wilson (1927): inside [0, 1], and sound near 0 and 1.

    `wilson_interval(5, 10)` is (0.2366, 0.7634), `wilson_interval(0, 10)` (0.0, 0.2775); with n = 0
    it is (0.0, 1.0). Raises ValueError unless 0 <= successes <= n.
    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
    Journal of the American Statistical Association 22 (1927), 209-212.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes must lie in 0..n: got {successes} of n = {n}")
    if n == 0:
        return 0.0, 1.0
    z2 = Z95 * Z95
    centre = (successes + z2 / 2) / (n + z2)
    half = Z95 * sqrt(successes * (n - successes) / n + z2 / 4) / (n + z2)
    # The bounds at k = 0 and k = n are exact; rounding must not move them by an ulp.
    lo = 0.0 if successes == 0 else centre - half
    hi = 1.0 if successes == n else centre + half
    return lo, hi


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the mean's 95% interval by Student's t, or None for one value, which has no spread.

    For independent, about normal values: `mean_interval([1, 2, 3])` is 2 -+ 4.303 / sqrt(3). Raises
    ValueError for no values. Source: Student, "The probable error of a mean", Biometrika 6 (1908),
    1-25.
    """
    n = len(values)
    if n == 0:
        raise ValueError("a mean needs a value: got none")
    if n == 1:
        return None
    mean, half = fmean(values), student_t95(n - 1) * stdev(values) / sqrt(n)
    return mean - half, mean + half


def student_t95(freedom: int) -> float:
    """Return the t with P(|T| <= t) = 0.95 at `freedom` >= 1 degrees of freedom.

    `student_t95(2)` is 4.303. The probability is a finite sum in the angle atan(t / sqrt(freedom)),
    inverted by bisection. Raises ValueError for freedom < 1.
    Source: M. Abramowitz and I. A. Stegun, Handbook of Mathematical Functions (1964), 26.7.3-4.
    """
    if freedom < 1:
        raise ValueError(f"freedom must be >= 1: got {freedom}")
    # t <= 12.71, that of one degree, bounds the angle.
    lo, hi = 0.0, atan(13.0 / sqrt(freedom))
    for _ in range(60):
        middle = (lo + hi) / 2
        lo, hi = (middle, hi) if _within(middle, freedom) < 0.95 else (lo, middle)
    return sqrt(freedom) * tan(hi)


def _within(angle: float, freedom: int) -> float:
    """Return P(|T| <= sqrt(freedom) tan(angle))."""
    odd = freedom % 2
    term = cos(angle) if odd else 1.0
    total = 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cos(angle) ** 2 * (power + 1) / (power + 2)
    total *= sin(angle)
    return (angle + total) * 2 / pi if odd else total


@dataclass(frozen=True)
class Difference:
    """Hold the mean of b - a over questions, its 95% interval, and how often resamples contradict
    its sign: twice the smaller of the shares at or below zero and at or above it, at most 1."""

    mean: float
    ci95: tuple[float, float]
    share: float


def resamples(groups: Sequence[str], count: int, seed: int) -> list[list[int]]:
    """Draw `count` bootstrap samples of the questions 0 .. len(groups) - 1, as their indices.

    `groups[i]` is the document of question i. Answers about one document are correlated, so whole
    documents are drawn where there are several, with all their questions, else single questions.
    Arms that are compared over the same resamples are paired. Raises ValueError without a question
    or a resample.
    Source: A. C. Davison and D. V. Hinkley, Bootstrap Methods and their Application (1997), 3.8.
    """
    if not groups or count < 1:
        raise ValueError(f"needs a question and a resample: got {len(groups)} and {count}")
    rng = random.Random(f"bootstrap/{seed}")
    members: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    if len(members) == 1:
        return [rng.choices(range(len(groups)), k=len(groups)) for _ in range(count)]
    pools = list(members.values())
    return [list(chain.from_iterable(rng.choices(pools, k=len(pools)))) for _ in range(count)]


def resampled_means(values: Sequence[float], drawn: Sequence[Sequence[int]]) -> list[float]:
    """Return the mean of `values` in each of the resamples."""
    return [sum(map(values.__getitem__, sample)) / len(sample) for sample in drawn]


def paired_difference(
    a: Sequence[float], b: Sequence[float], means_a: Sequence[float], means_b: Sequence[float]
) -> Difference:
    """Return the difference b - a over questions. `means_a` and `means_b` are `resampled_means`
    over the same resamples. The interval is that of percentiles (B. Efron, "Bootstrap methods:
    another look at the jackknife", Annals of Statistics 7 (1979), 1-26)."""
    means = sorted(map(sub, means_b, means_a))
    n = len(means)
    # Equal means of unequal sums may differ by an ulp, which is not a sign.
    low = sum(m <= 1e-12 for m in means) / n
    high = sum(m >= -1e-12 for m in means) / n
    ci95 = (means[ceil(0.025 * n) - 1], means[ceil(0.975 * n) - 1])
    return Difference(fmean(map(sub, b, a)), ci95, min(1.0, 2 * min(low, high)))
