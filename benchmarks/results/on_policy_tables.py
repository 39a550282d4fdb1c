"""Make the tables of docs/studies/on_policy.md from the records of configs/study_on_policy.yaml.

An arm is a start with a text, under one direction of the KL. It has two outcomes on each document:
the share of held-out questions answered right, and nats a token over one passage, teacher-forced.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from benchmarks.results import records
from benchmarks.results.study_tables import Cells, kept_trials, p_value
from protocols.records.intervals import holm, mean_interval, mean_p

# The arm, what it is compared with, and the direction of the KL: as they were registered.
PRIMARY = (("cold, on policy", "cold, offline", "forward"),)
SECONDARY = (
    ("matched, on policy", "matched, offline", "forward"),
    ("warm, on policy", "cold, offline", "forward"),
    ("cold, offline", "cold, offline, reused", "forward"),
    ("cold, on policy, repaired", "cold, on policy", "forward"),
    ("cold, on policy", "cold, offline", "reverse"),
    ("matched, on policy", "matched, offline", "reverse"),
)


@dataclass
class ArmOutcomes:
    """Hold the outcomes of an arm by seed."""

    right: dict[int, float] = field(default_factory=dict)
    nats: dict[int, float] = field(default_factory=dict)


def outcomes(study: str) -> dict[tuple[str, str], ArmOutcomes]:
    """Return the outcomes of configs/STUDY.yaml by (shown arm, direction), as far as runs are
    kept."""
    found: dict[tuple[str, str], ArmOutcomes] = defaultdict(ArmOutcomes)
    for record, trial in kept_trials(study):
        direction = trial.spec.learn.loss.direction
        right: dict[str, list[float]] = defaultdict(list)
        for row in records.rows(record, "answers.jsonl", records.HOME):
            if not row["sampled"]:
                right[row["arm"]].append(row["right"])
        measured = records.whole(record, "eval.json", records.HOME)["rows"]
        # The arm of a warm start is told as "hybrid" by `forge eval`.
        nats = {
            "on_policy" if row["kind"] == "hybrid" else row["kind"]: math.log(
                row["passages"]["value"]
            )
            for row in measured
        }
        for arm, shown in trial.arms:
            own = found[shown, direction]
            own.right[trial.seed] = fmean(right[arm])
            if arm in nats:
                own.nats[trial.seed] = nats[arm]
    return found


def every_arm(study: str) -> tuple[Cells, list[Cells]]:
    """Return heads and rows: the mean outcomes of every arm with Student's 95% intervals."""
    body = [
        [arm, direction, str(len(own.right)), *_shown(own.right.values(), 100, ".1f", (0.0, 100.0)),
         *_shown(own.nats.values(), 1, ".2f")]
        for (arm, direction), own in outcomes(study).items()
    ]  # fmt: skip
    heads = ["arm", "KL", "documents", "right, %", "95% interval", "nats a token", "95% interval"]
    return heads, body


def primary(study: str) -> tuple[Cells, list[Cells]]:
    """Return heads and rows of the comparison that decides the claim."""
    return _compared(study, PRIMARY)


def secondary(study: str) -> tuple[Cells, list[Cells]]:
    """Return heads and rows of the comparisons beside it."""
    return _compared(study, SECONDARY)


def _compared(study: str, asked: Sequence[tuple[str, str, str]]) -> tuple[Cells, list[Cells]]:
    """Return paired differences over documents, with p-values adjusted for all of them together."""
    found = outcomes(study)
    tests: list[tuple[Cells, list[float], float, str]] = []
    for arm, other, direction in asked:
        a, b = found[arm, direction], found[other, direction]
        for name, ours, theirs, scale, form in (
            ("right, points", a.right, b.right, 100.0, "+.1f"),
            ("nats a token", a.nats, b.nats, 1.0, "+.2f"),
        ):
            paired = [ours[seed] - theirs[seed] for seed in sorted(ours) if seed in theirs]
            tests.append(([f"{arm} over {other}", direction, name], paired, scale, form))
    adjusted = holm([mean_p(paired) for _, paired, _, _ in tests])
    body = [
        [
            *shown,
            str(len(paired)),
            *_shown(paired, scale, form),
            p_value(p),
        ]
        for (shown, paired, scale, form), p in zip(tests, adjusted, strict=True)
    ]
    return ["arms", "KL", "outcome", "documents", "difference", "95% interval", "p (Holm)"], body


def _shown(
    values: Iterable[float], scale: float, form: str, within: tuple[float, float] | None = None
) -> Cells:
    own = [scale * value for value in values]
    if not own:
        return ["", ""]
    low, high = mean_interval(own) or (math.nan, math.nan)
    if within is not None:
        low, high = max(low, within[0]), min(high, within[1])
    return [format(fmean(own), form), "" if len(own) == 1 else f"{low:{form}} to {high:{form}}"]
