"""Tabulate a sweep over curricula of the main job: what each arm reaches, and in which time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

from cartridge_forge.plugins.statistics.intervals import mean_interval, mean_p
from studies import archive
from studies.archive import document, rows
from studies.tables.cells import Units, p_value, paired, points, shares, spread

SAMPLED, GREEDY, LOSS = "sampled answers right", "greedy answers right", "loss of the right answer"
PROCESSOR, SECONDS = "processor seconds", "seconds"
TRAINED = "on_policy"


def by_arm(study: str, sweep: str) -> dict[str, dict[str, Units]]:
    """Return the outcomes of every arm by name and seed: shares, nats a token, and seconds of the
    whole run, those of the processors over all its processes. Sampled answers are those of
    `forge eval` over the run's last cartridges."""
    outcomes: dict[str, dict[str, Units]] = defaultdict(lambda: defaultdict(dict))
    for run in archive.runs(study, sweep):
        units = outcomes[run.arms[TRAINED]]
        greedy = [r for r in rows(study, f"{run.name}/answers.jsonl") if r["arm"] == TRAINED]
        (evaluated,) = document(study, f"{run.name}/eval.json")["rows"]
        units[SAMPLED][run.seed] = evaluated["free_running"]["accuracy"]
        units[GREEDY][run.seed] = fmean(row["right"] for row in greedy)
        units[LOSS][run.seed] = fmean(row["nll"] for row in greedy)
        results = document(study, f"{run.name}/results.json")
        steps = [r for r in rows(study, f"{run.name}/metrics.jsonl") if r["arm"] == TRAINED]
        units[PROCESSOR][run.seed] = results["cpu"]["all"]
        units[SECONDS][run.seed] = results["wall_seconds"]
        units["steps"][run.seed] = len(steps)
        units["tokens"][run.seed] = sum(row["tokens"] for row in steps)
    return outcomes


def curriculum_arms(study: str, sweep: str) -> tuple[list[str], list[list[str]]]:
    """Return each arm's means over the seeds, with Student's 95% intervals of the outcomes."""
    body = []
    for arm, units in by_arm(study, sweep).items():
        accuracies = [
            f"{mean}% ({bounds})"
            for mean, bounds in (shares(units[outcome].values()) for outcome in (SAMPLED, GREEDY))
        ]
        steps, tokens, seconds = (
            f"{fmean(units[name].values()):,.0f}" for name in ("steps", "tokens", PROCESSOR)
        )
        loss = f"{fmean(units[LOSS].values()):.3f}"
        body.append([arm, str(len(units[GREEDY])), steps, tokens, *accuracies, loss, seconds])
    heads = ["curriculum", "clinics", "steps", "trained tokens", "sampled", "greedy"]
    return [*heads, "loss of the right answer, nats", "processor seconds of a run"], body


def curriculum_differences(study: str, sweep: str) -> tuple[list[str], list[list[str]]]:
    """Return what every arm has over the sweep's reference, clinic by clinic: differences, and of
    seconds the ratio, whose mean is geometric; Student's 95% intervals, and p-values."""
    reference = str(next(run.reference for run in archive.runs(study, sweep)))
    outcomes = by_arm(study, sweep)
    body = []
    for arm, units in outcomes.items():
        if arm == reference:
            continue
        body += [
            [f"{arm} over {reference}", *row] for row in _comparisons(units, outcomes[reference])
        ]
    return ["curricula", "outcome", "difference", "95% interval", "p"], body


def _comparisons(ours: Mapping[str, Units], theirs: Mapping[str, Units]) -> list[list[str]]:
    body = []
    for outcome in (SAMPLED, GREEDY):
        gaps = paired(ours[outcome], theirs[outcome])
        body.append([f"{outcome}, points", *points(gaps), p_value(mean_p(gaps))])
    gaps = paired(ours[LOSS], theirs[LOSS])
    body.append([f"{LOSS}, nats", *spread(gaps, "+.3f"), p_value(mean_p(gaps))])
    for outcome in (PROCESSOR, SECONDS):
        logs = [math.log(v / theirs[outcome][unit]) for unit, v in ours[outcome].items()]
        low, high = mean_interval(logs) or (math.nan, math.nan)
        ratio = f"x {math.exp(fmean(logs)):.2f}"
        bounds = f"{math.exp(low):.2f} to {math.exp(high):.2f}"
        body.append([f"{outcome}, ratio", ratio, bounds, ""])
    return body
