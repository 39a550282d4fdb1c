"""Tabulate what was tried beside the study: the pilot of verified rollouts
of 2026-11-30 (its script is in the history), and forms of the main job."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from cartridge_forge.plugins.statistics.intervals import SHARE_DIFFERENCE, mean_interval
from studies.archive import document

WARM = "warm start"
HEADS = [
    "arm", "sampled recitation", "over plain", "greedy recitation", "nats a token of the note",
    "accepted, first and last step", "trained tokens",
]  # fmt: skip


def pilot_arms(study: str, record: str) -> tuple[list[str], list[list[str]]]:
    """Return the table of a kept record of the pilot."""
    return arms_of(document(study, f"{record}.json"))


def arms_of(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the arms' means over charts, and their differences from the arm `plain`, paired by
    chart, with Student's 95% intervals."""
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(record["rows"], key=lambda row: row["chart"]):
        by_arm.setdefault(row["arm"], []).append(row)
    body = []
    for arm in sorted(by_arm, key=lambda name: name != WARM):
        rows = by_arm[arm]
        means = [f"{fmean(r[k] for r in rows):.3f}" for k in ("sampled", "greedy", "nats")]
        difference, accepted, tokens = "-", "-", "-"
        if arm not in ("plain", WARM):
            pairs = zip(rows, by_arm["plain"], strict=True)
            gains = [a["sampled"] - b["sampled"] for a, b in pairs]
            difference = f"{fmean(gains):+.3f}"
            if interval := mean_interval(gains, SHARE_DIFFERENCE):
                difference += f" ({interval[0]:+.3f} to {interval[1]:+.3f})"
        if "accepted_last" in rows[0]:
            shares = [100 * fmean(r[f"accepted_{n}"] for r in rows) for n in ("first", "last")]
            accepted = f"{shares[0]:.1f}%, {shares[1]:.1f}%"
        if "tokens" in rows[0]:
            tokens = f"{fmean(r['tokens'] for r in rows):,.0f}"
        body.append([arm, means[0], difference, *means[1:], accepted, tokens])
    return HEADS, body


def main_job_forms(study: str, record: str) -> tuple[list[str], list[list[str]]]:
    """Return the accuracies of the forms of the main job that a record has."""
    body = [
        [
            row["arm"], str(row["steps"] or "-"), f"{row['tokens']:,}" if row["tokens"] else "-",
            f"{row['greedy']:.1%}", f"{row['sampled']:.1%}",
        ]
        for row in document(study, f"{record}.json")["rows"]
    ]  # fmt: skip
    return ["form", "steps", "trained tokens", "greedy", "sampled"], body
