"""The rows of a check of a GPU: what was found beside what is wanted, and how a failure is told."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.record import ROOT

OK, FAILED, TOLD, NOT_RUN = "ok", "FAILED", "told", "NOT RUN"


@dataclass(frozen=True)
class Outcome:
    """Hold what one row found. `passed` is None for a figure that has no bound."""

    found: str
    passed: bool | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckRow:
    """Hold one row: its name, the bound in words, what was found, the verdict (OK, FAILED, TOLD or
    NOT_RUN), an error with its place, and the seconds it took."""

    name: str
    wanted: str
    found: str = ""
    verdict: str = NOT_RUN
    error: str = ""
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Check:
    """Hold a row's name, its bound in words, and what finds it."""

    name: str
    wanted: str
    work: Callable[[], Outcome]


def run_checks(checks: Iterable[Check]) -> Iterator[CheckRow]:
    """Yield a row for each check, in order. One that raises is a row that failed, and the next one
    runs all the same."""
    for check in checks:
        start = time.perf_counter()
        try:
            outcome, error = check.work(), ""
        except Exception as raised:
            outcome, error = Outcome("", False), told_error(raised)
        verdict = TOLD if outcome.passed is None else OK if outcome.passed else FAILED
        yield CheckRow(
            check.name, check.wanted, outcome.found, verdict, error,
            round(time.perf_counter() - start, 3), outcome.figures,
        )  # fmt: skip


def told_error(error: BaseException) -> str:
    """Return an error's type, text and the last line of this repository that it passed."""
    traced = traceback.extract_tb(error.__traceback__)
    own_frames = [f for f in traced if "site-packages" not in f.filename] or traced
    where = (
        f" at {os.path.relpath(own_frames[-1].filename, ROOT)}:{own_frames[-1].lineno}"
        if own_frames
        else ""
    )
    return f"{type(error).__name__}{where}: {error}"[:500]


def table(rows: Sequence[CheckRow]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| row | wanted | found | verdict |", "|---|---|---|---|"]
    for row in rows:
        result = "; ".join(part for part in (row.found, row.error) if part)
        cells = (row.name, row.wanted, result, row.verdict)
        lines.append(f"| {' | '.join(cell.replace('|', '/').strip() for cell in cells)} |")
    return "\n".join(line.replace(chr(10), " ") for line in lines) + "\n"
