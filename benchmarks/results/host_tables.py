"""Make the tables of several hosts: publishes that were measured, meshes that were simulated."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_run.formatting import seconds_text

HOME = Path(__file__).parent
MB = 1e6
Cells = tuple[Sequence[str], list[list[str]]]


def publishes(results: Mapping[str, Any]) -> Cells:
    """Return seconds and bytes of each publish, beside the link's limit and the bare transfers."""
    heads = [
        "Gbit/s", "hosts", "", "publish", "limit", "over it", "bare", "bare, all at once",
        "over these", "most to a host", "most from one", "from the controller",
    ]  # fmt: skip
    rows = results["rows"]
    return heads, [_publish(row) for row in sorted(rows, key=lambda r: (r["gbit"], r["hosts"]))]


def _publish(row: Mapping[str, Any]) -> list[str]:
    moved = (row[name] / MB for name in ("to_a_host", "from_a_host", "from_controller"))
    return [
        f"{row['gbit']:g}", str(row["hosts"]), row["publish"], f"{row['seconds']:.2f} s",
        f"{row['limit_s']:.3f} s", f"{row['over_limit']:.1f}x", f"{row['bare_s']:.2f} s",
        f"{row['bare_at_once_s']:.2f} s", f"{row['over_bare_at_once']:.1f}x",
        *(f"{one:.0f} MB" for one in moved),
    ]  # fmt: skip


def simulated(results: Mapping[str, Any]) -> Cells:
    """Return a simulated step from 1 to 1,000 hosts."""
    heads = [
        "hosts", "step", "overhead", "publish", "requests", "store", "loop", "Monarch", "silence",
        "start", "one trainer",
    ]  # fmt: skip
    return heads, [
        [
            f"{row['hosts']:,}", _shown(row["step"]), f"{row['overhead']:.0%}",
            _shown(row["publish"]), _shown(row["dispatch"]), f"{row['store_share']:.0%}",
            f"{row['loop_share']:.1%}", f"{row['wire_share']:.0%}", _shown(row["silence"]),
            seconds_text(row["start"]), seconds_text(row["one_trainer"]),
        ]
        for row in results["rows"]
    ]  # fmt: skip


def limits(results: Mapping[str, Any]) -> Cells:
    """Return the fewest hosts at which each limit of a simulated mesh breaks, by remedy."""
    found = results["breaks_at"]
    heads = ["breaks at hosts", *next(iter(found.values()))]
    return heads, [
        [remedy, *("holds" if hosts is None else f"{hosts:,}" for hosts in at.values())]
        for remedy, at in found.items()
    ]


def _shown(seconds: float) -> str:
    return seconds_text(seconds) if math.isfinite(seconds) else "never"


def results_of(record: str) -> Mapping[str, Any]:
    """Return what a benchmark's record beside this file found."""
    found: Mapping[str, Any] = json.loads((HOME / f"{record}.json").read_text())["results"]
    return found
