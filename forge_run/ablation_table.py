"""What an ablation came to: the figures of its runs, their means with intervals, and the table.

runs of an arm, one a seed  ->  figures_of  ->  summarise  ->  table
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from forge_run.display import UNKNOWN, duration, percent
from forge_run.figures import Section, count_text
from protocols.errors import RunError
from protocols.files import iter_rows
from protocols.intervals import mean_interval
from services.rundir import RunDirectory
from services.spending import Spending

CAPTION = (
    "reward: mean of the last quarter of the steps; gain: that less the first step's, which is "
    "untrained's; over grpo: that less the reward of grpo's run of the same seed",
    "accuracy: greedy, held out; time: of a whole run, from its start to its evaluation",
    "means over the seeds, with Student's 95% interval; tokens, time and the teachers' dollars are "
    "those of one run",
)
DOCUMENT = "objective.w_doc is 0 in all arms but all+doc, which has the config's own"


def figures_of(directory: RunDirectory) -> dict[str, float]:
    """reward, gain, accuracy, tokens, wall_seconds and dollars of one finished run.

    Dollars are those of the ledger: a vote that was found there again cost nothing, and a call that
    came too late for its vote was paid all the same.
    """
    results = directory.read_results() or {}
    first, last = _rewards(directory)
    paid = Spending(directory.ledger).total()["dollars"]
    return {
        "reward": last,
        "gain": last - first,
        "accuracy": results["arms"]["on_policy"]["accuracy"],
        "tokens": results["tokens_trained"]["on_policy"],
        "wall_seconds": results["wall_seconds"],
        "dollars": math.fsum(paid.values()),
    }


def untrained_of(directory: RunDirectory) -> dict[str, float]:
    """Where the runs of a seed begin: the reward of the first step's episodes, and accuracy where
    the run measured it."""
    arms = (directory.read_results() or {})["arms"]
    measured = {"accuracy": arms["untrained"]["accuracy"]} if "untrained" in arms else {}
    return {"reward": _rewards(directory)[0], **measured}


def _rewards(directory: RunDirectory) -> tuple[float, float]:
    """The mean reward of the first step's episodes, and that of the last quarter's steps."""
    rows = [row for row in iter_rows(directory.metrics) if row["arm"] == "on_policy"]
    rewards = [row["episodes"].get("reward") for row in rows]
    last = [reward for reward in rewards[-max(1, len(rewards) // 4) :] if reward is not None]
    if not last or rewards[0] is None:
        raise RunError(
            f"run {directory.id} has no reward where it begins or ends; see the errors in "
            f"{directory.episodes}, move the run away and ablate again"
        )
    return rewards[0], fmean(last)


def summarise(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """arm -> figure -> values, one a seed, their mean, and ci95 or None with a single seed.

    `runs` holds the figures of every run of an arm, seed by seed. `over_grpo` compares rewards
    within a seed, whose arms met the same tasks: its interval is narrower than two rewards' are.
    """
    arms: dict[str, Any] = {}
    for arm, each in runs.items():
        columns = {figure: [figures[figure] for figures in each] for figure in each[0]}
        if arm not in ("untrained", "grpo"):
            rewards = zip(columns["reward"], runs["grpo"], strict=True)
            columns["over_grpo"] = [reward - grpo["reward"] for reward, grpo in rewards]
        arms[arm] = {
            figure: {"mean": fmean(values), "ci95": mean_interval(values), "values": values}
            for figure, values in columns.items()
        }
    return arms


def table(mesh: str, arms: Mapping[str, Any]) -> tuple[Section, ...]:
    """The arms side by side, and how to read them."""
    columns = (
        "arm", "reward", "gain", "95% CI", "over grpo", "95% CI", "accuracy", "95% CI", "tokens",
        "time", "teachers",
    )  # fmt: skip
    rows = tuple((arm, *_cells(figures)) for arm, figures in arms.items())
    seeds = len(arms["untrained"]["reward"]["values"])
    title = f"ablation of {mesh}, {seeds} seed{'s' if seeds > 1 else ''}"
    notes = Section("how to read it", ("",), tuple((line,) for line in caption(arms)))
    return Section(title, columns, rows), notes


def caption(arms: Mapping[str, Any]) -> tuple[str, ...]:
    return (*CAPTION, DOCUMENT) if "all+doc" in arms else CAPTION


def _cells(figures: Mapping[str, Any]) -> tuple[str, ...]:
    def mean(figure: str, shown: Callable[[float], str]) -> str:
        return shown(figures[figure]["mean"]) if figure in figures else UNKNOWN

    def between(figure: str, scale: float, form: str) -> str:
        ci95 = figures[figure]["ci95"] if figure in figures else None
        return UNKNOWN if ci95 is None else " .. ".join(format(scale * x, form) for x in ci95)

    return (
        mean("reward", "{:.3f}".format),
        mean("gain", "{:+.3f}".format),
        between("gain", 1, "+.3f"),
        mean("over_grpo", "{:+.3f}".format),
        between("over_grpo", 1, "+.3f"),
        mean("accuracy", percent),
        between("accuracy", 100, ".1f"),
        mean("tokens", count_text),
        mean("wall_seconds", duration),
        mean("dollars", "${:.4f}".format),
    )
