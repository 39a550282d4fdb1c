"""Make the tables of the study "kinds" from the records of `forge bench`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cartridge_forge.plugins.evaluate.bench.kinds import by_text, kind_results, loss_of
from cartridge_forge.plugins.evaluate.bench.reading import BenchAnswer
from cartridge_forge.plugins.evaluate.bench.running import BenchRow, rows_of
from cartridge_forge.plugins.statistics.intervals import (
    SHARE_DIFFERENCE,
    holm,
    mean_interval,
    mean_p,
)
from studies.archive import document
from studies.tables.cells import p_value, paired, spread

Cells = list[str]
ANSWERABLE = ("words", "other_words", "together", "counting", "whole")
CLOSED_FORM = ("attention_matching", "matching_passages")
TRAINED = ("offline", "offline_passages")


def outcomes_by_kind(study: str, record: str) -> tuple[Sequence[str], list[Cells]]:
    """Return each method's outcomes kind by kind, in percent."""
    body = [
        [
            one.method, one.kind, *_percent(one.gap, one.gap_interval),
            *_percent(one.f1, one.f1_interval), *_percent(one.declines, one.declines_interval),
        ]
        for one in kind_results(rows_of(document(study, f"{record}.json")))
    ]  # fmt: skip
    between = "95% interval"
    return ["arm", "kind", "gap closed", between, "F1", between, "declines", between], body


def loss_comparisons(
    study: str, record: str, arms: tuple[str, str] = CLOSED_FORM
) -> tuple[Sequence[str], list[Cells]]:
    """Return the registered comparisons of the loss of right answers, in nats a token, over texts:
    the cartridge (the first of `arms`) over passages, and both together (the second) over each."""
    rows = rows_of(document(study, f"{record}.json"))
    cartridge, combined = arms
    body = compared(rows, [(cartridge, "passages")])
    body += compared(rows, [(combined, cartridge), (combined, "passages")])
    heads = ["arm", "over", "kind", "texts", "difference", "95% interval", "p (Holm)", "decided"]
    return heads, body


def refusal_comparison(
    study: str, record: str, arms: tuple[str, str] = CLOSED_FORM
) -> tuple[Sequence[str], list[Cells]]:
    """Return the differences in right refusals, in points."""

    def declines(answer: BenchAnswer) -> float:
        return float(answer.declines)

    rows, body = rows_of(document(study, f"{record}.json")), []
    for arm in arms:
        ours, theirs = (by_text(rows, one, "unanswerable", declines) for one in (arm, "passages"))
        gaps = paired(ours, theirs)
        body.append(
            [arm, "passages", str(len(gaps)), *spread(gaps, "+.1f", 100.0, SHARE_DIFFERENCE)]
        )
    return ["arm", "over", "texts", "right refusals, points", "95% interval"], body


def compared(rows: Sequence[BenchRow], pairs: Sequence[tuple[str, str]]) -> list[Cells]:
    """Return the rows of pairs of arms, adjusted together by Holm's method."""
    tests = []
    for arm, other in pairs:
        for kind in ANSWERABLE:
            gaps = paired(*(by_text(rows, one, kind, loss_of) for one in (arm, other)))
            tests.append(([arm, other, kind, str(len(gaps)), *spread(gaps, "+.2f")], gaps))
    adjusted = holm([mean_p(gaps) for _, gaps in tests])
    return [
        [*cells, p_value(p), _verdict(gaps)]
        for (cells, gaps), p in zip(tests, adjusted, strict=True)
    ]


def _verdict(gaps: Sequence[float]) -> str:
    """Return what the interval of differences in loss decides."""
    low, high = mean_interval(gaps) or (-math.inf, math.inf)
    return "worse" if low > 0 else "better" if high < 0 else "open"


def _percent(share: float | None, interval: tuple[float, float] | None) -> tuple[str, str]:
    between = "" if interval is None else " to ".join(f"{100 * x:.1f}" for x in interval)
    return "" if share is None else f"{100 * share:.1f}", between
