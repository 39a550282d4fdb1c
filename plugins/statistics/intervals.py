"""Compute confidence intervals: of a share (k right answers of n), of a mean over a few seeds, and
of the difference of two arms that answered the same questions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import atan, cos, pi, sin, sqrt, tan
from operator import sub
from statistics import fmean, pstdev, stdev

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


def mean_p(values: Sequence[float]) -> float:
    """Return the two-sided p-value by Student's t of a mean that is zero; 1 for fewer than two
    values. `mean_p([1, 2, 3])` is 0.074: t is 2 * sqrt(3) at 2 degrees of freedom."""
    n = len(values)
    if n < 2:
        return 1.0
    mean, error = fmean(values), stdev(values) / sqrt(n)
    if error == 0:
        return 0.0 if mean else 1.0
    return 1 - _within(atan(abs(mean) / error / sqrt(n - 1)), n - 1)


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
    """Hold the mean of b - a over questions with its 95% interval.

    `p` is the two-sided p-value of no difference. `share` is how often resamples contradict the
    sign: twice the smaller of the shares at or below zero and at or above it, at most 1.
    """

    mean: float
    ci95: tuple[float, float]
    share: float
    p: float


@dataclass(frozen=True)
class ClusterResamples:
    """Hold bootstrap samples of questions, as indices. `units` counts what varies independently:
    the documents, or the facts where there is one document."""

    units: int
    drawn: tuple[tuple[int, ...], ...]


def resamples(
    documents: Sequence[str], facts: Sequence[str], count: int, seed: int
) -> ClusterResamples:
    """Draw `count` bootstrap samples of the questions 0 .. len(documents) - 1 in two stages.

    Question i is about `documents[i]` and asks for `facts[i]`. Answers about one document are
    correlated, and more so those about one fact. So documents are drawn with replacement, then in
    each the facts, with all their questions. Of a single document the facts alone are drawn. Arms
    that are compared over the same resamples are paired. Raises ValueError without a question or a
    resample.
    Source: A. C. Davison and D. V. Hinkley, Bootstrap Methods and their Application (1997), 3.8.
    """
    if not documents or count < 1:
        raise ValueError(f"needs a question and a resample: got {len(documents)} and {count}")
    rng = random.Random(f"bootstrap/{seed}")
    members: dict[str, dict[str, list[int]]] = {}
    for i, (document, fact) in enumerate(zip(documents, facts, strict=True)):
        members.setdefault(document, {}).setdefault(fact, []).append(i)
    pools = [list(by_fact.values()) for by_fact in members.values()]
    drawn = []
    for _ in range(count):
        chosen = pools if len(pools) == 1 else rng.choices(pools, k=len(pools))
        of_facts = chain.from_iterable(rng.choices(pool, k=len(pool)) for pool in chosen)
        drawn.append(tuple(chain.from_iterable(of_facts)))
    return ClusterResamples(len(pools) if len(pools) > 1 else len(pools[0]), tuple(drawn))


def paired_difference(
    a: Sequence[float], b: Sequence[float], draws: ClusterResamples
) -> Difference:
    """Return the difference b - a over questions.

    The interval is mean -+ t * SE: SE is the standard deviation over the resamples times
    sqrt(n / (n - 1)), and t is Student's with n - 1 degrees of freedom, for n units. Percentiles of
    the resamples are too narrow for few units (T. Hesterberg, "What teachers should know about the
    bootstrap", The American Statistician 69 (2015), 371-386). A p-value is at least 1 over the
    count of resamples plus 1. With one unit the interval is that of no spread, and p is 1.
    """
    differences = list(map(sub, b, a))
    mean = fmean(differences)
    means = [sum(map(differences.__getitem__, d)) / len(d) for d in draws.drawn]
    count, units = len(means), draws.units
    # Equal means of unequal sums may differ by an ulp, which is not a sign.
    low = sum(m <= 1e-12 for m in means) / count
    high = sum(m >= -1e-12 for m in means) / count
    share = min(1.0, 2 * min(low, high))
    if units == 1:
        return Difference(mean, (mean, mean), share, 1.0)
    error = pstdev(means) * sqrt(units / (units - 1))
    half = student_t95(units - 1) * error
    if error > 1e-12:
        p = 1 - _within(atan(abs(mean) / error / sqrt(units - 1)), units - 1)
    else:
        p = 1.0 if abs(mean) <= 1e-12 else 0.0
    return Difference(mean, (mean - half, mean + half), share, max(p, 1 / (count + 1)))


def holm(p: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for testing all of them, in their order.

    `holm([0.01, 0.04, 0.03])` is [0.03, 0.06, 0.06]. Source: S. Holm, "A simple sequentially
    rejective multiple test procedure", Scandinavian Journal of Statistics 6 (1979), 65-70.
    """
    adjusted = [0.0] * len(p)
    highest = 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        highest = max(highest, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = highest
    return adjusted
