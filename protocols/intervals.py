"""Confidence intervals: of a share, k right answers of n; and of a mean over a few seeds."""

from __future__ import annotations

from collections.abc import Sequence
from math import atan, cos, pi, sin, sqrt, tan
from statistics import fmean, stdev

Z95 = 1.959963984540054  # the 97.5% quantile of the standard normal distribution


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """The 95% score interval of Wilson (1927), which stays inside [0, 1] and is sound near 0 and 1.

    `wilson_interval(5, 10)` is (0.2366, 0.7634), `wilson_interval(0, 10)` (0.0, 0.2775). With n = 0
    nothing is known: (0.0, 1.0).
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
    """The 95% interval of the mean of independent, about normal values, by Student's t.

    `mean_interval([1, 2, 3])` is 2 -+ 4.303 / sqrt(3); one value alone tells nothing of the spread:
    None. Source: Student, "The probable error of a mean", Biometrika 6 (1908), 1-25.
    """
    n = len(values)
    if n == 0:
        raise ValueError("a mean needs a value: got none")
    if n == 1:
        return None
    mean, half = fmean(values), student_t95(n - 1) * stdev(values) / sqrt(n)
    return mean - half, mean + half


def student_t95(freedom: int) -> float:
    """The t that |T| stays under with probability 0.95, at `freedom` >= 1 degrees of freedom.

    `student_t95(2)` is 4.303. The probability is a finite sum in the angle atan(t / sqrt(freedom)),
    inverted by halving.
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
    """P(|T| <= sqrt(freedom) tan(angle))."""
    odd = freedom % 2
    term = cos(angle) if odd else 1.0
    total = 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cos(angle) ** 2 * (power + 1) / (power + 2)
    total *= sin(angle)
    return (angle + total) * 2 / pi if odd else total
