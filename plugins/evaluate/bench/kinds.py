"""Tell the outcomes of `forge bench` by the kind of question, where a file of questions has kinds.

Six questions of a kind about one text are few, and the gap between no text and the whole text may
be next to nothing on them. So a kind's gap is one ratio over all texts, the sum of what is closed
over the sum of what there was to close, and not a mean of ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from cartridge_forge.plugins.evaluate.bench.reading import LEAST_GAP, BenchAnswer
from cartridge_forge.plugins.evaluate.bench.running import BenchRow
from cartridge_forge.plugins.statistics.intervals import (
    SHARE,
    Bounds,
    mean_interval,
    ratio_interval,
)

Units = dict[str, float]  # an outcome by text


@dataclass(frozen=True)
class KindResult:
    """Hold what a method makes of the questions of one kind: `gap`, the share of the loss between
    no text and the whole text that it closes, None where the whole text does not help; `f1`, None
    for unanswerable questions; `declines`, the share of answers that decline. Intervals are 95%
    ones over texts, None of one text."""

    method: str
    kind: str
    questions: int
    gap: float | None
    gap_interval: tuple[float, float] | None
    f1: float | None
    f1_interval: tuple[float, float] | None
    declines: float
    declines_interval: tuple[float, float] | None


def by_text(
    rows: Sequence[BenchRow], method: str, kind: str, value: Callable[[BenchAnswer], float | None]
) -> Units:
    """Return the mean value by text over a method's answers to questions of a kind, without those
    that have none."""
    units = {}
    for row in rows:
        values = [value(a) for a in row.answers if row.method == method and a.kind == kind]
        if present := [x for x in values if x is not None]:
            units[row.text] = fmean(present)
    return units


def loss_of(answer: BenchAnswer) -> float:
    """Return an answer's loss."""
    return answer.loss


def kind_results(rows: Sequence[BenchRow]) -> list[KindResult]:
    """Return the results of each method and kind, in the order of their first rows; none where no
    question has a kind. A gap needs the rows of the methods `none` and `document`."""
    last_rows = [row for row in rows if row.answers]
    kinds = dict.fromkeys(a.kind for row in last_rows for a in row.answers if a.kind)
    return [
        _result(last_rows, method, kind)
        for method in dict.fromkeys(row.method for row in last_rows)
        for kind in kinds
    ]


def _result(rows: Sequence[BenchRow], method: str, kind: str) -> KindResult:
    answers = [a for r in rows if r.method == method for a in r.answers if a.kind == kind]
    f1, f1_interval = _mean(by_text(rows, method, kind, lambda a: a.f1), SHARE)
    declines, declines_interval = _mean(by_text(rows, method, kind, lambda a: a.declines), SHARE)
    gap, gap_interval = None, None
    if f1 is not None:
        gap, gap_interval = _closed(rows, method, kind)
    return KindResult(
        method, kind, len(answers), gap, gap_interval, f1, f1_interval,
        declines or 0.0, declines_interval,
    )  # fmt: skip


def _mean(units: Units, bounds: Bounds) -> tuple[float | None, tuple[float, float] | None]:
    values = list(units.values())
    return (fmean(values), mean_interval(values, bounds)) if values else (None, None)


def _closed(
    rows: Sequence[BenchRow], method: str, kind: str
) -> tuple[float | None, tuple[float, float] | None]:
    """Return the share of the gap that a method closes, with its interval."""
    losses, none, document = (
        by_text(rows, one, kind, loss_of) for one in (method, "none", "document")
    )
    texts = [text for text in losses if text in none and text in document]
    wholes = [none[text] - document[text] for text in texts]
    if not texts or fmean(wholes) < LEAST_GAP:
        return None, None
    parts = [none[text] - losses[text] for text in texts]
    return sum(parts) / sum(wholes), ratio_interval(parts, wholes)
