"""Answer what the page that compares runs shows: their curves, settings and paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cartridge_forge.plugins.evaluate.compare import flat_settings, read_source
from cartridge_forge.plugins.watch.pages.run_page import curves
from cartridge_forge.plugins.watch.pages.run_view import RunView
from cartridge_forge.protocols.errors import DataError, ForgeError

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
    from cartridge_forge.plugins.evaluate.comparison import (
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
