"""Make the tables of docs/corpus.md: by how many charts a question could be about, and by seed."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import Any

from benchmarks.results import records
from environments.clinic.prompts import said_answer
from protocols.records.intervals import mean_interval, wilson_interval

Cells = list[str]


def shared_facts(names: str) -> tuple[Cells, list[Cells]]:
    """Return heads and rows: answers of the arm on_policy of the records `names`, joined by commas,
    by how many charts have an answer to the same words.

    Right, and of each record the answers that another of these charts would have made right.
    """
    of = names.split(",")
    heads = ["charts with an answer", "questions", "one drawn by lot"]
    heads += [f"{name}: {what}" for name in of for what in ("right", "another chart's")]
    counted = {name: _by_charts(_answers(name, "on_policy")) for name in of}
    body = []
    for charts, first in sorted(counted[of[0]].items()):
        row = [str(charts), str(len(first)), _percent(1 / charts)]
        for name in of:
            rows = counted[name][charts]
            right = [r for r, _ in rows]
            row += [_with_interval(sum(right), len(right)), _percent(fmean(o for _, o in rows))]
        body.append(row)
    return heads, body


def seeds(name: str) -> tuple[Cells, list[Cells]]:
    """Return heads and rows: greedy accuracy of every arm of the records in the folder `name`, each
    called VARIANT-SEED, seed by seed, with the mean and Student's 95% interval within 0 to 1."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for folder in sorted((records.HOME / name).iterdir()):
        variant, _, seed = folder.name.rpartition("-")
        own: dict[str, list[float]] = defaultdict(list)
        for row in _answers(f"{name}/{folder.name}"):
            own[row["arm"]].append(row["right"])
        for arm, right in own.items():
            found[f"{variant.replace('_', ' ')}: {arm.replace('_', ' ')}"][seed] = fmean(right)
    every = sorted({seed for values in found.values() for seed in values})
    body = []
    for arm, values in sorted(found.items()):
        low, high = mean_interval(list(values.values())) or (None, None)
        shown = [_percent(values[seed]) if seed in values else "" for seed in every]
        shown.append(_percent(fmean(values.values())))
        known = low is not None and high is not None
        shown.append(f"{_percent(max(0.0, low))} to {_percent(min(1.0, high))}" if known else "")
        body.append([arm, *shown])
    return ["", *every, "mean", "95% interval"], body


def _by_charts(rows: list[dict[str, Any]]) -> dict[int, list[tuple[bool, bool]]]:
    """Return whether each answer is right, and is that of another chart, by number of charts."""
    answers: dict[str, dict[str, str]] = defaultdict(dict)
    for row in rows:
        answers[row["fact"]][row["document"]] = row["expected"]
    found: dict[int, list[tuple[bool, bool]]] = defaultdict(list)
    for row in rows:
        said = (said_answer(row["text"]) or "").strip(" .")
        right = row["right"] == 1.0
        others = {a for d, a in answers[row["fact"]].items() if d != row["document"]}
        found[len(answers[row["fact"]])].append((right, not right and said in others))
    return found


def _answers(name: str, arm: str | None = None) -> list[dict[str, Any]]:
    rows = records.rows(name, "answers.jsonl")
    return [row for row in rows if not row["sampled"] and arm in (None, row["arm"])]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _with_interval(k: int, n: int) -> str:
    low, high = wilson_interval(k, n)
    return f"{_percent(k / n)} ({100 * low:.1f} to {100 * high:.1f})"
