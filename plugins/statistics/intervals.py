"""Compute confidence intervals: of a share (k right answers of n), of a mean over a few seeds, and
of the difference of two arms that answered the same questions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf, isfinite, sqrt
from operator import sub
from statistics import fmean, pstdev, stdev

Bounds = tuple[float, float]  # the least and the greatest value that a quantity can have
ANY: Bounds = (-inf, inf)
AT_LEAST_ZERO: Bounds = (0.0, inf)
SHARE: Bounds = (0.0, 1.0)
SHARE_DIFFERENCE: Bounds = (-1.0, 1.0)

NO_SPREAD = 1e-12  # equal means of unequal sums may differ by an ulp


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
    from scipy.stats import binomtest  # a second to import

    interval = binomtest(successes, n).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def mean_interval(values: Sequence[float], bounds: Bounds = ANY) -> tuple[float, float] | None:
    """Return the mean's 95% interval by Student's t, or None for one value, which has no spread.

    For independent, about normal values: `mean_interval([1, 2, 3])` is 2 -+ 4.303 / sqrt(3). It is
    cut at `bounds`, which takes nothing from how often it covers the mean; where all values lie on
    one of two bounds it is the exact interval of n of n. Raises ValueError for no values. Source:
    Student, "The probable error of a mean", Biometrika 6 (1908), 1-25.
    """
    n = len(values)
    if n == 0:
        raise ValueError("a mean needs a value: got none")
    if n == 1:
        return None
    return _student_interval(fmean(values), stdev(values) / sqrt(n), n, bounds)


def ratio_interval(parts: Sequence[float], wholes: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95% interval of sum(parts) / sum(wholes) over units, by Student's t, or None for
    one unit.

    Its error is that of the mean of parts - ratio * wholes over the mean of wholes, the linear term
    of the ratio: `ratio_interval([1, 3], [2, 4])` is 2/3 -+ 12.706 / 9. Raises ValueError for none,
    for lists of two lengths, and for wholes whose sum is not positive. Source: W. G. Cochran,
    Sampling Techniques (1977), 6.4.
    """
    if not parts or sum(wholes) <= 0:
        raise ValueError(f"a ratio needs units with a positive sum: got {list(wholes)}")
    ratio, n = sum(parts) / sum(wholes), len(parts)
    if n == 1:
        return None
    residuals = [part - ratio * total for part, total in zip(parts, wholes, strict=True)]
    half = student_t95(n - 1) * stdev(residuals) / sqrt(n) / fmean(wholes)
    return ratio - half, ratio + half


def mean_p(values: Sequence[float]) -> float:
    """Return the two-sided p-value by Student's t of a mean that is zero; 1 for fewer than two
    values. `mean_p([1, 2, 3])` is 0.074: t is 2 * sqrt(3) at 2 degrees of freedom."""
    n = len(values)
    return 1.0 if n < 2 else _student_p(fmean(values), stdev(values) / sqrt(n), n)


def student_t95(freedom: int) -> float:
    """Return the t with P(|T| <= t) = 0.95 at `freedom` >= 1 degrees of freedom.

    `student_t95(2)` is 4.303. Raises ValueError for freedom < 1.
    """
    if freedom < 1:
        raise ValueError(f"freedom must be >= 1: got {freedom}")
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))


def _student_interval(mean: float, error: float, units: int, bounds: Bounds) -> tuple[float, float]:
    """Return the 95% interval of a mean over `units` with the standard error `error`."""
    low, high = bounds
    if error <= NO_SPREAD and isfinite(high - low) and min(mean - low, high - mean) <= NO_SPREAD:
        # All of the units lie on one bound. Clopper and Pearson's interval of their share is
        # 0.025^(1/n) to 1, and the others may lie on the other bound.
        from scipy.stats import binomtest

        least = float(binomtest(units, units).proportion_ci(method="exact").low)
        width = (1 - least) * (high - low)
        return (low, low + width) if mean - low <= NO_SPREAD else (high - width, high)
    half = student_t95(units - 1) * error
    return max(low, mean - half), min(high, mean + half)


def _student_p(mean: float, error: float, units: int) -> float:
    """Return the two-sided p-value of a zero mean; without spread that of the units' signs."""
    if abs(mean) <= NO_SPREAD:
        return 1.0
    if error <= NO_SPREAD:
        from scipy.stats import binomtest

        return float(binomtest(units, units).pvalue)
    from scipy.special import stdtr

    return float(2 * stdtr(units - 1, -abs(mean) / error))


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
    a: Sequence[float], b: Sequence[float], draws: ClusterResamples, bounds: Bounds = ANY
) -> Difference:
    """Return the difference b - a over questions; of shares, `bounds` is SHARE_DIFFERENCE.

    The interval is mean -+ t * SE: SE is the standard deviation over the resamples times
    sqrt(n / (n - 1)), and t is Student's with n - 1 degrees of freedom, for n units. Percentiles of
    the resamples are too narrow for few units (T. Hesterberg, "What teachers should know about the
    bootstrap", The American Statistician 69 (2015), 371-386). The interval is cut at `bounds`;
    where every unit lies on one bound it is the exact one of n of n. A p-value is that of the signs
    where the units do not differ, and at least 1 over the count of resamples plus 1. One unit tells
    nothing of others: p is 1, and the interval is that of no spread.
    """
    differences = list(map(sub, b, a))
    mean = fmean(differences)
    means = [sum(map(differences.__getitem__, d)) / len(d) for d in draws.drawn]
    count, units = len(means), draws.units
    low = sum(m <= NO_SPREAD for m in means) / count
    high = sum(m >= -NO_SPREAD for m in means) / count
    share = min(1.0, 2 * min(low, high))
    if units == 1:
        return Difference(mean, (mean, mean), share, 1.0)
    error = pstdev(means) * sqrt(units / (units - 1))
    p = max(_student_p(mean, error, units), 1 / (count + 1))
    return Difference(mean, _student_interval(mean, error, units, bounds), share, p)


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
