"""Read the teachers' calls and costs so far from the ledger while others write it, without a
lock."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from protocols.teacher_replay import NANO
from teachers.budget import ANSWERED

UNUSABLE = "unusable"  # answered, but not with a vote


class RunSpending:
    """Follow the ledger of a run. `total` covers all its rows, including those of earlier
    starts."""

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger
        self._offset = 0
        self._open: set[str] = set()  # unsettled attempts: only the first settlement counts
        self._calls: dict[str, Counter[str]] = {}
        self._nanodollars: Counter[str] = Counter()

    def total(self) -> dict[str, dict[str, Any]]:
        """Return settled attempts by outcome and their cost: `{"calls": {"opus": {"answered": 4,
        "http_500": 1}}, "dollars": {"opus": 0.0123}}`."""
        self._read()
        return {
            "calls": {teacher: dict(calls) for teacher, calls in sorted(self._calls.items())},
            "dollars": {name: spent / NANO for name, spent in sorted(self._nanodollars.items())},
        }

    def _read(self) -> None:
        """Count the rows appended since the last call."""
        if not self._ledger.is_file():
            return
        with self._ledger.open("rb") as file:
            file.seek(self._offset)
            fresh = file.read()
        whole = fresh.rfind(b"\n") + 1  # the rest is still being written
        for line in fresh[:whole].splitlines():
            self._add(json.loads(line))
        self._offset += whole

    def _add(self, row: dict[str, Any]) -> None:
        if row["kind"] == "reserved":
            self._open.add(row["attempt"])
        elif row["attempt"] in self._open:
            self._open.remove(row["attempt"])
            answered = row["outcome"] == ANSWERED
            outcome = UNUSABLE if answered and not row["usable"] else row["outcome"]
            self._calls.setdefault(row["teacher"], Counter())[outcome] += 1
            self._nanodollars[row["teacher"]] += row["nanodollars"]
