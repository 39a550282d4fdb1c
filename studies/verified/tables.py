"""Tabulate the study of verified text: rates, arms, and the comparisons as they were registered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from cartridge_forge.plugins.statistics.intervals import (
    AT_LEAST_ZERO,
    SHARE,
    holm,
    mean_interval,
    mean_p,
)
from studies.archive import document
from studies.tables.cells import Units, p_value, paired, points, spread

WARM = "warm start"
Rows = Sequence[Mapping[str, Any]]

# Study, arm, what it is compared with, and on how many of the first charts (None: on all).
PRIMARY = (
    ("A", "verified, forward", "plain, forward", 8),
    ("C", "offline, JSD", "offline, forward", 16),
)
EQUAL = ("B", "verified, JSD", "offline, JSD")
SECONDARY = (
    ("verified, forward", "offline, forward", 8),
    ("verified, JSD", "verified, forward", 8),
)
FEWEST, MOST, EACH, MARGIN = 32, 96, 16, 0.03
POWER = 2.93  # z(0.95) + z(0.90): equal arms are seen to be so in 80 of 100 studies


def charts_needed(spread_of_differences: float) -> int:
    """Return the charts of study B from the standard deviation of its first 32 differences, by the
    rule that README.md registered: `charts_needed(0.1)` is 96, of 0.05 it is 32."""
    needed = (POWER * spread_of_differences / MARGIN) ** 2
    return int(min(MOST, max(FEWEST, EACH * math.ceil(needed / EACH))))


def rates(study: str, record: str) -> tuple[list[str], list[list[str]]]:
    """Return the means of sampled recitation of each arm at each rate."""
    by_arm: dict[str, dict[float, list[float]]] = {}
    for row in document(study, f"{record}.json")["rows"]:
        by_arm.setdefault(row["arm"], {}).setdefault(row["rate"], []).append(row["sampled"])
    start = fmean(by_arm.pop(WARM)[0.0])
    tried = sorted({rate for of_arm in by_arm.values() for rate in of_arm})
    body = [["before: the warm start", f"{start:.3f}", *["-"] * (len(tried) - 1)]]
    for arm, of_arm in by_arm.items():
        means = {rate: fmean(values) for rate, values in of_arm.items()}
        best = max(means.values())
        body.append(
            [arm, *(f"**{m:.3f}**" if m == best else f"{m:.3f}" for m in map(means.get, tried))]
        )
    return ["arm", *(f"rate {rate:g}" for rate in tried)], body


def arm_means(study: str, record: str) -> tuple[list[str], list[list[str]]]:
    """Return each arm's outcomes, tokens and seconds of sampling, over its charts."""
    by_arm: dict[str, list[Mapping[str, Any]]] = {}
    for row in document(study, f"{record}.json")["rows"]:
        by_arm.setdefault(row["arm"], []).append(row)
    body = []
    for arm, rows in by_arm.items():
        outcomes = [
            " (".join(spread((r[k] for r in rows), ".3f", bounds=BOUNDS[k])) + ")" for k in OUTCOMES
        ]
        tokens = accepted = seconds = "-"
        if "tokens" in rows[0]:
            tokens = f"{fmean(r['tokens'] for r in rows):,.0f}"
            sampled = 1e3 * fmean(r["sampling_cpu_s"] for r in rows)
            seconds = f"{sampled / fmean(r['tokens'] for r in rows):.1f}"
        if "accepted_last" in rows[0]:
            shares = [100 * fmean(r[f"accepted_{n}"] for r in rows) for n in ("first", "last")]
            accepted = f"{shares[0]:.1f}%, {shares[1]:.1f}%"
        rate = f"{rows[0]['rate']:g}" if rows[0]["rate"] else "0.4"
        body.append([arm, rate, str(len(rows)), *outcomes, accepted, tokens, seconds])
    heads = ["arm", "rate", "charts", *OUTCOMES.values(), "accepted, first and last step"]
    return [*heads, "trained tokens", "processor ms of sampling a trained token"], body


BOUNDS = {"sampled": SHARE, "greedy": SHARE, "nats": AT_LEAST_ZERO}
OUTCOMES = {
    "sampled": "sampled recitation",
    "greedy": "greedy recitation",
    "nats": "nats a token of the note",
}


def primary(study: str, record: str) -> tuple[list[str], list[list[str]]]:
    """Return the comparisons A and C, which decide, with p-values adjusted for the two."""
    rows = document(study, f"{record}.json")["rows"]
    differences = [_differences(rows, arm, other, most) for _, arm, other, most in PRIMARY]
    body = [
        [name, f"{arm} over {other}", str(len(values)), *points(values), p_value(p)]
        for (name, arm, other, _), values, p in zip(
            PRIMARY, differences, holm([mean_p(values) for values in differences]), strict=True
        )
    ]
    return ["study", "arms", "charts", "points", "95% interval", "p (Holm)"], body


def equal(study: str, record: str) -> tuple[list[str], list[list[str]]]:
    """Return study B: the difference, both intervals, and what they decide."""
    name, arm, other = EQUAL
    values = _differences(document(study, f"{record}.json")["rows"], arm, other, None)
    low, high = _ninety(values)
    apart = mean_interval(values) or (-math.inf, math.inf)
    verdict = "open"
    if apart[0] > 0 or apart[1] < 0:
        verdict = "verified is better" if apart[0] > 0 else "offline is better"
    if low >= -MARGIN and high <= MARGIN:
        verdict = "equal within 3 points"
    mean, interval = points(values)
    ninety = f"{100 * low:+.1f} to {100 * high:+.1f}"
    s = f"{stdev(values[:FEWEST]):.3f}"
    body = [[name, f"{arm} over {other}", s, str(len(values)), mean, ninety, interval, verdict]]
    heads = ["study", "arms", "s of the first 32", "charts", "points", "90% interval"]
    return [*heads, "95% interval", "decided"], body


def secondary(study: str, record: str) -> tuple[list[str], list[list[str]]]:
    """Return the differences that are told without a test, and those of A and C, in all three
    outcomes."""
    rows = document(study, f"{record}.json")["rows"]
    pairs = [*((a, b, n) for _, a, b, n in PRIMARY), *SECONDARY]
    body = []
    for arm, other, most in pairs:
        cells = []
        for outcome in OUTCOMES:
            mean, interval = spread(_differences(rows, arm, other, most, outcome), "+.3f")
            cells.append(f"{mean} ({interval})")
        count = len(_differences(rows, arm, other, most))
        body.append([f"{arm} over {other}", str(count), *cells])
    return ["arms", "charts", *OUTCOMES.values()], body


def _differences(
    rows: Rows, arm: str, other: str, most: int | None, outcome: str = "sampled"
) -> list[float]:
    """Return the paired differences of two arms, on the first `most` of the charts of both."""
    ours, theirs = (
        Units({r["chart"]: r[outcome] for r in rows if r["arm"] == name}) for name in (arm, other)
    )
    shared = sorted(ours.keys() & theirs.keys())[:most]
    return paired({chart: ours[chart] for chart in shared}, theirs)


def _ninety(values: Sequence[float]) -> tuple[float, float]:
    """Return Student's 90% interval of the mean."""
    from scipy.special import stdtrit

    half = float(stdtrit(len(values) - 1, 0.95)) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half
