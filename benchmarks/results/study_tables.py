"""Make the tables of docs/studies: arms of a sweep over its unit, and paired differences.

The records of a sweep are those of `benchmarks.results.sweeps.keep`; a record's name gives its
variant of the sweep and its seed, which is the unit: a document or a desk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean

from benchmarks.results import records
from benchmarks.results.sweeps import planned_trials
from forge_run.experiments.trials import Trial
from protocols.files import REPOSITORY
from protocols.records.intervals import mean_interval
from protocols.spec.experiments import SweepSpec
from protocols.spec.loading import load_file

Cells = list[str]
LAST_STEPS = 5  # whose mean reward ends a run


def by_arm(name: str) -> dict[str, dict[int, float]]:
    """Return greedy accuracy by shown arm and seed, from the records of configs/NAME.yaml."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for record, arms, seed in _kept(name):
        right: dict[str, list[float]] = defaultdict(list)
        for row in records.rows(record, "answers.jsonl", records.HOME):
            if not row["sampled"]:
                right[row["arm"]].append(row["right"])
        for arm, shown in arms.items():
            found[shown][seed] = fmean(right[arm])
    return found


def over_reference(name: str) -> tuple[Cells, list[Cells]]:
    """Return heads and rows: accuracy of every arm, and its paired difference from the sweep's
    reference, each with Student's 95% interval over the units that have both."""
    reference = sweep_spec(name).reference
    assert reference is not None
    arms = by_arm(name)
    base = arms[reference]
    body = []
    for arm, values in arms.items():
        paired = [values[seed] - base[seed] for seed in values if seed in base]
        own = list(values.values())
        gain = ["", ""] if arm == reference else with_interval(paired, "+.1f", None)
        body.append([arm, str(len(own)), *with_interval(own, ".1f", (0.0, 1.0)), *gain])
    heads = ["arm", "units", "right, %", "95% interval", f"over {reference}, points"]
    return [*heads, "95% interval"], body


def between(name: str) -> tuple[Cells, list[Cells]]:
    """Return heads and rows: the paired difference of each two trained arms but the reference, the
    later in the sweep minus the earlier, with Student's 95% interval."""
    spec, arms = sweep_spec(name), by_arm(name)
    trained = dict.fromkeys(shown["on_policy"] for _, shown, _ in _kept(name))
    pairs = combinations([arm for arm in trained if arm != spec.reference], 2)
    body = [
        [f"{late} over {early}", *with_interval(paired, "+.1f", None)]
        for early, late in pairs
        if (paired := [arms[late][s] - arms[early][s] for s in arms[late] if s in arms[early]])
    ]
    return ["arms", "difference, points", "95% interval"], body


def collapses(name: str) -> tuple[Cells, list[Cells]]:
    """Return heads and rows: of every trained arm its mean accuracy over that of the untrained
    cartridge, and over its runs the least of the last steps' mean reward minus the first step's."""
    arms = by_arm(name)
    changes: dict[str, list[float]] = defaultdict(list)
    for record, shown, _ in _kept(name):
        rows = [
            r
            for r in records.rows(record, "metrics.jsonl", records.HOME)
            if r["arm"] == "on_policy"
        ]
        rewards = [row["episodes"]["reward"] for row in rows]
        changes[shown["on_policy"]].append(fmean(rewards[-LAST_STEPS:]) - rewards[0])
    untrained = fmean(arms["untrained"].values())
    body = [
        [arm, f"{100 * (fmean(arms[arm].values()) - untrained):+.1f}", f"{min(own):+.2f}"]
        for arm, own in changes.items()
    ]
    return ["arm", "over untrained, points", "least change of reward in a run"], body


def kept_trials(name: str, sets: tuple[str, ...] = ()) -> list[tuple[str, Trial]]:
    """Return every trial of configs/NAME.yaml, with `sets`, that is kept, with its record."""
    trials = planned_trials(_path(name), sets)
    return [(r, t) for r, t in trials if (records.HOME / r / "answers.jsonl.gz").is_file()]


def _kept(name: str) -> list[tuple[str, Mapping[str, str], int]]:
    """Return record, arms by shown name, and seed of every trial that is kept."""
    return [(record, dict(trial.arms), trial.seed) for record, trial in kept_trials(name)]


def p_value(p: float) -> str:
    """Return a p-value as tables show it: three digits, or "< 0.001"."""
    return f"{p:.3f}" if p >= 0.0005 else "< 0.001"


def with_interval(
    values: Sequence[float], form: str, within: tuple[float, float] | None
) -> list[str]:
    """Return the mean of shares in points and its Student's 95% interval, cut to `within`."""
    if not values:
        return ["", ""]
    shown, interval = format(100 * fmean(values), form), mean_interval(values)
    if interval is None:
        return [shown, ""]
    low, high = interval
    if within is not None:
        low, high = max(low, within[0]), min(high, within[1])
    return [shown, f"{100 * low:{form}} to {100 * high:{form}}"]


def sweep_spec(name: str) -> SweepSpec:
    """Return the sweep of configs/NAME.yaml."""
    return load_file(SweepSpec, _path(name))


def _path(name: str) -> Path:
    return REPOSITORY / "configs" / f"{name}.yaml"
