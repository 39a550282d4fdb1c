"""The confidence interval of a share: k right answers of n."""

from __future__ import annotations

from math import sqrt

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
