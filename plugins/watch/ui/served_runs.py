"""Find the runs that pages are served of, one run or those of a folder, and answer what the
page that compares them shows: curves, settings and paired differences.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.evaluate.compare import flat_settings, read_source
from cartridge_forge.plugins.watch.commands.runs import RunSummary, summary_of
from cartridge_forge.plugins.watch.control.endpoints import find_run
from cartridge_forge.plugins.watch.pages.run_page import curves
from cartridge_forge.plugins.watch.pages.run_view import RunView
from cartridge_forge.protocols.errors import ControlError, DataError, ForgeError
from cartridge_forge.services.run_directory import LATEST

DEPTH = 4  # folders between the one that was named and a run
OPEN_RUNS = 16  # whose rows are held at a time


class ServedRuns:
    """Give access to the runs by key: the path below `root`, or of a single run its id.

    Raises DataError for a place without runs.
    """

    def __init__(self, where: Path) -> None:
        self._views: OrderedDict[str, RunView] = OrderedDict()
        self._lock = threading.Lock()
        if not where.is_dir():
            try:
                where = find_run(Path("runs"), str(where))
            except ControlError as error:
                raise DataError(
                    f"there is nothing at {where}: give a run's directory or id, or a folder of "
                    "runs such as runs"
                ) from error
        self.root = where.resolve()
        self.single = (self.root / "spec.yaml").is_file()

    def paths(self) -> dict[str, Path]:
        """Return the runs by key, the last started first."""
        if self.single:
            return {self.root.name: self.root}
        paths = {
            spec.parent.relative_to(self.root).as_posix(): spec.parent
            for depth in range(1, DEPTH + 1)
            for spec in self.root.glob("/".join(["*"] * depth) + "/spec.yaml")
            if LATEST not in spec.relative_to(self.root).parts
        }
        return dict(sorted(paths.items(), key=lambda item: item[1].name, reverse=True))

    def summaries(self) -> list[tuple[str, RunSummary]]:
        """Return how each run stands, with its key."""
        return [(key, summary_of(path)) for key, path in self.paths().items()]

    def view(self, key: str) -> RunView:
        """Return a run. Raises DataError for one that is not served."""
        with self._lock:
            if (view := self._views.get(key)) is not None and view.run.spec.is_file():
                self._views.move_to_end(key)
                return view
            path = self.paths().get(key)
            if path is None:
                raise DataError(f"there is no run {key[:200]!r} under {self.root}; see the list")
            view = self._views[key] = RunView(key, path)
            while len(self._views) > OPEN_RUNS:
                self._views.popitem(last=False)
            return view


MOST_RUNS = 8
ABSENT = "-"


def compared(views: Sequence[RunView]) -> dict[str, Any]:
    """Return the curves of each run, and the settings in which they differ. Raises DataError for no
    run, or too many."""
    _check(views)
    return {
        "runs": [{"key": view.key, **curves(view, 0, 0)} for view in views],
        "settings": _differing(views),
    }


def _check(views: Sequence[RunView]) -> None:
    if not 1 <= len(views) <= MOST_RUNS:
        raise DataError(f"choose 1 to {MOST_RUNS} runs: got {len(views)}")


def _differing(views: Sequence[RunView]) -> list[dict[str, Any]]:
    specs = [view.spec for view in views]
    flat = [{} if spec is None else dict(flat_settings(spec.as_dict())) for spec in specs]
    keys = sorted(set().union(*flat))
    rows = [
        {"key": key, "values": [settings.get(key, ABSENT) for settings in flat]} for key in keys
    ]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def paired(views: Sequence[RunView]) -> dict[str, Any]:
    """Return the runs' paired differences as `forge compare` tells them, or why there are none.
    Raises DataError for no run, or too many."""
    from cartridge_forge.plugins.evaluate.compare import (
        RESAMPLES,
        compare_groups,
        grouped,
        remarks,
    )

    _check(views)
    try:
        groups = grouped([read_source(view.run.path) for view in views], sampled=False)
        comparisons = compare_groups(groups)
    except ForgeError as error:
        return {"comparisons": [], "notes": [], "why_not": str(error)}
    return {
        "comparisons": [one.as_dict() for one in comparisons], "notes": remarks(comparisons),
        "why_not": None, "resamples": RESAMPLES,
    }  # fmt: skip
