"""Make the tables of docs/studies/aggregation.md, from the frontiers of its sweeps.

A chart, or a pair of them, is the unit: every arm answers the same questions over its cartridges.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import Any

from benchmarks.results import records
from benchmarks.results.study_tables import (
    Cells,
    kept_trials,
    p_value,
    sweep_spec,
    with_interval,
)
from protocols.records.intervals import holm, mean_p

OURS = "rsa"
SHOWN = {
    "self_consistency": "vote over whole answers",
    "part_vote": "vote over each part",
    "best_of_n": "best of N by confidence",
    "rsa": "aggregation",
}
PRIMARY = "self_consistency"  # decides the claim; the others are told beside it


def by_strategy(study: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the rows of the frontiers by strategy and seed, as far as charts are kept."""
    found: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for record, trial in kept_trials(study):
        if not (records.HOME / record / "frontier.json").is_file():
            continue
        for row in records.whole(record, "frontier.json", records.HOME)["arms"]:
            found[row["strategy"]][trial.seed] = row
    return found


def merging_arms(study: str) -> tuple[Cells, list[Cells]]:
    """Return heads and rows: of every arm the questions with all parts right, F1, and compute."""
    body = []
    for strategy, rows in by_strategy(study).items():
        own = list(rows.values())
        right = with_interval([row["accuracy"] for row in own], ".1f", (0.0, 1.0))
        f1, tokens, read = (
            fmean(row[key] for row in own) for key in ("f1", "tokens", "prompt_tokens")
        )
        body.append(
            [SHOWN[strategy], str(len(own)), *right, f"{f1:.3f}", f"{tokens:.0f}", f"{read:.0f}"]
        )
    heads = ["arm", "pairs of charts", "all parts right, %", "95% interval", "F1", "tokens sampled"]
    return [*heads, "tokens read"], body


def merging_differences(study: str) -> tuple[Cells, list[Cells]]:
    """Return heads and rows: aggregation minus every other arm, pair by pair, with Student's 95%
    interval; the first decides the claim, and only it has a p-value."""
    arms = by_strategy(study)
    ours = arms.get(OURS, {})
    body = []
    for strategy in sorted(SHOWN, key=lambda name: name != PRIMARY):
        theirs = arms.get(strategy, {})
        if strategy == OURS or not theirs:
            continue
        paired = [ours[s]["accuracy"] - theirs[s]["accuracy"] for s in sorted(ours) if s in theirs]
        p = p_value(mean_p(paired)) if strategy == PRIMARY else ""
        body.append([SHOWN[strategy], str(len(paired)), *with_interval(paired, "+.1f", None), p])
    return ["aggregation over", "pairs of charts", "difference, points", "95% interval", "p"], body


def trained_to_aggregate(study: str) -> tuple[Cells, list[Cells]]:
    """Return heads and rows: of every way to train, what aggregation adds to one sample over the
    trained cartridge, and the paired difference from the sweep's reference, with Student's 95%
    intervals and p-values adjusted by Holm."""
    alone: dict[str, list[float]] = defaultdict(list)
    added: dict[str, dict[int, float]] = defaultdict(dict)
    for record, trial in kept_trials(study):
        rows = records.whole(record, "frontier.json", records.HOME)["arms"]
        right = {row["strategy"]: row["accuracy"] for row in rows}
        shown = dict(trial.arms)["on_policy"]
        alone[shown].append(right[PRIMARY])
        added[shown][trial.seed] = right[OURS] - right[PRIMARY]
    reference = sweep_spec(study).reference
    base = added.get(reference or "", {})
    paired = {
        arm: [gain - base[seed] for seed, gain in gains.items() if seed in base]
        for arm, gains in added.items()
        if arm != reference
    }
    adjusted = dict(zip(paired, holm([mean_p(values) for values in paired.values()]), strict=True))
    body = []
    for arm, gains in added.items():
        over = with_interval(paired[arm], "+.1f", None) if arm in paired else ["", ""]
        p = p_value(adjusted[arm]) if arm in paired else ""
        body.append(
            [arm, str(len(gains)), f"{100 * fmean(alone[arm]):.1f}",
             *with_interval(list(gains.values()), "+.1f", None), *over, p]
        )  # fmt: skip
    heads = ["trained on", "charts", "one sample right, %", "aggregation adds, points"]
    return [*heads, "95% interval", f"over {reference}, points", "95% interval", "p, Holm"], body
