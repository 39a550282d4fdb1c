"""Run every method over every text, and keep what is measured in one file that a repeated command
goes on from."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from cartridge_forge.plugins.evaluate.bench.methods import METHODS, Bench
from cartridge_forge.plugins.evaluate.bench.reading import BenchAnswer, BenchText, outcome
from cartridge_forge.plugins.statistics.intervals import mean_interval
from cartridge_forge.protocols.errors import DataError, SpecError
from cartridge_forge.protocols.files import write_atomically

SCHEMA = 2


@dataclass(frozen=True)
class BenchRow:
    """Hold one point of a method over a text: the processor's seconds and training steps up to it,
    the numbers that it adds to memory, and what it is worth (`reading.CompressionOutcome`). The
    last one has `answers`."""

    text: str
    method: str
    step: int
    seconds: float
    numbers: int
    loss: float
    gap: float
    kl: float
    agreement: float
    f1: float | None = None
    answers: tuple[BenchAnswer, ...] = ()


def method_rows(bench: Bench, text: BenchText, method: str) -> Iterator[BenchRow]:
    """Yield the rows of a method. Its seconds are this process's processor time, in which no
    outcome is measured."""
    points = METHODS[method](bench, text)
    seconds = 0.0
    while True:
        began = time.process_time()
        point = next(points, None)
        seconds += time.process_time() - began
        if point is None:
            return
        worth = vars(outcome(text, point.reader, answered=point.last))
        yield BenchRow(text.name, method, point.step, seconds, point.numbers, **worth)


def rows_of(content: Mapping[str, Any]) -> list[BenchRow]:
    """Return the rows of a bench.json as it was parsed."""
    return [
        BenchRow(**{**row, "answers": tuple(BenchAnswer(**one) for one in row["answers"])})
        for row in content["rows"]
    ]


def run(
    file: Path, settings: Mapping[str, object], names: Sequence[str], methods: Sequence[str],
    opened: Callable[[str], tuple[Bench, BenchText]],
    show: Callable[[BenchRow], None], leave_out: Callable[[DataError], None],
) -> list[BenchRow]:  # fmt: skip
    """Return all rows, text by text, and write them to `file` after each method; what is there is
    not measured again. `opened` reads a text; one for which it raises a DataError is left out.
    Raises SpecError where the file has other `settings`, and the DataError where no text is left.
    """
    ends: dict[str, Mapping[str, float]] = {}
    rows: list[BenchRow] = []
    if file.exists():
        content = json.loads(file.read_text())
        if content["settings"] != settings:
            raise SpecError(
                f"{file} was measured with other settings: {content['settings']}; give another "
                "--out, or the same options"
            )
        if content["schema"] != SCHEMA:
            raise SpecError(f"{file} has an older form, without answers; give another --out")
        ends, rows = content["ends"], rows_of(content)
    have = {(row.text, row.method) for row in rows}
    for name in names:
        lacking = [method for method in methods if (name, method) not in have]
        if not lacking:
            continue
        try:
            bench, text = opened(name)
        except DataError as error:
            if not rows and name == names[-1]:
                raise
            leave_out(error)
            continue
        ends[name] = {
            "tokens": len(text.ids), "questions": len(text.right), "none": text.none_loss,
            "document": text.document_loss,
        }  # fmt: skip
        for method in lacking:
            for row in method_rows(bench, text, method):
                rows.append(row)
                show(row)
            content = {
                "schema": SCHEMA, "settings": settings, "ends": ends, "rows": [*map(asdict, rows)]
            }  # fmt: skip
            write_atomically(file, json.dumps(content, indent=1) + "\n")
    return [r for r in rows if r.text in names and r.method in methods]


@dataclass(frozen=True)
class MethodResult:
    """Hold a method's last point as means over texts; `interval` is that of the gap, None of one
    text."""

    method: str
    texts: int
    gap: float
    interval: tuple[float, float] | None
    kl: float
    agreement: float
    f1: float
    seconds: float
    numbers: float
    steps: int


def results(rows: Sequence[BenchRow]) -> list[MethodResult]:
    """Return each method's result, in the order of its first row."""
    last: dict[str, dict[str, BenchRow]] = defaultdict(dict)
    for row in rows:
        last[row.method][row.text] = row
    return [
        MethodResult(
            method, len(ends),
            fmean(r.gap for r in ends), mean_interval([r.gap for r in ends]),
            fmean(r.kl for r in ends), fmean(r.agreement for r in ends),
            fmean(r.f1 or 0.0 for r in ends),
            fmean(r.seconds for r in ends), fmean(r.numbers for r in ends),
            max(r.step for r in ends),
        )
        for method, ends in ((method, list(by_text.values())) for method, by_text in last.items())
    ]  # fmt: skip


def seconds_to(rows: Sequence[BenchRow], gap: float) -> dict[str, float | None]:
    """Return of each method the mean over texts of the seconds until a point closes `gap`, None
    where it does not on every text."""
    texts = {row.text for row in rows}
    first: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.gap >= gap:
            first[row.method].setdefault(row.text, row.seconds)
    return {
        method: fmean(first[method].values()) if set(first[method]) == texts else None
        for method in dict.fromkeys(row.method for row in rows)
    }
