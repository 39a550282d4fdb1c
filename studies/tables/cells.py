"""Write numbers as the cells of a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from cartridge_forge.plugins.statistics.intervals import (
    ANY,
    SHARE,
    SHARE_DIFFERENCE,
    Bounds,
    mean_interval,
    wilson_interval,
)

Units = dict[Any, float]  # an outcome by document, desk or article


def table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    first, *lines = [
        ("| " + " | ".join(row) + " |").replace("|  |", "| |") for row in (heads, *body)
    ]
    return [first, "|---" * len(heads) + "|", *lines]


def spread(
    values: Iterable[float], form: str, scale: float = 1.0, bounds: Bounds = ANY
) -> tuple[str, str]:
    """Return a mean and its Student's 95% interval within `bounds`, both then scaled. The interval
    is empty for fewer than two values."""
    outcomes = list(values)
    if not outcomes:
        return "", ""
    mean = format(scale * fmean(outcomes), form)
    interval = mean_interval(outcomes, bounds)
    return mean, "" if interval is None else " to ".join(format(scale * x, form) for x in interval)


def points(values: Iterable[float]) -> tuple[str, str]:
    """Return the mean of differences of shares, in points."""
    return spread(values, "+.1f", 100.0, SHARE_DIFFERENCE)


def shares(values: Iterable[float]) -> tuple[str, str]:
    """Return the mean of shares in percent."""
    return spread(values, ".1f", 100.0, SHARE)


def counted(k: int, n: int) -> tuple[str, str]:
    """Return k of n in percent, with Wilson's 95% interval."""
    low, high = wilson_interval(k, n)
    return f"{100 * k / n:.1f}%", f"{100 * low:.1f}% to {100 * high:.1f}%"


def p_value(p: float) -> str:
    """Return a p-value as tables show it: three digits, or "< 0.001"."""
    return f"{p:.3f}" if p >= 0.0005 else "< 0.001"


def paired(ours: Units, theirs: Units) -> list[float]:
    """Return the differences of the units that both have."""
    return [value - theirs[unit] for unit, value in ours.items() if unit in theirs]


def decided(differences: Sequence[float]) -> str:
    """Return what the interval decides by the rule of the study "real": 0.1 nats matter."""
    low, high = mean_interval(differences) or (-math.inf, math.inf)
    if low > 0:
        return "worse"
    if high < 0:
        return "better"
    return "no difference that matters" if low >= -0.1 and high <= 0.1 else "open"
