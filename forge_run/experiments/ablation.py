"""Measure what each loss channel adds and costs: `forge ablate MESH.yaml`.

An ablation is a sweep of five variants, run in sequence; the first four form a 2 x 2 design:

    grpo       the policy gradient alone
    +sdpo      grpo and hint distillation
    +replay    grpo and the teachers' preferences
    all        grpo and both
    all+doc    all and document distillation, where the config weighs it

The arms of one seed must begin with the same episodes, so they differ by their training alone; this
is checked. An interrupted ablation continues: finished runs are not repeated.

    runs/three_channels/20260726T101530Z-3fa9/    every run, as `forge run` keeps it
    runs/ablate-three_channels/ablation.json      arm and seed -> run; at the end the figures
    runs/ablate-three_channels/grpo-0.log         the output of that run
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

from forge_run.console import UNKNOWN, duration, percent
from forge_run.experiments import sweep
from forge_run.experiments.child_run import run_side_by_side
from forge_run.experiments.table import interval_text
from forge_run.experiments.trials import (
    Runner,
    Trial,
    read_runs,
    require_all,
    runs_of,
    write_record,
)
from forge_run.formatting import TableSection, count_text
from protocols.errors import RunError, SpecError
from protocols.records.intervals import mean_interval
from protocols.spec.experiments import SweepSpec
from protocols.spec.loading import load_spec
from services.run_directory import RunDirectory, iter_rows
from teachers.ledger import RunSpending

# Beside sweep.PLAIN, keys that save time and do not change the table. The user's --set overrides
# them.
PLAIN = ("objective.compare_every=0", "evaluate.arms=[untrained, on_policy]")
# Keys that switch off an arm's channels. They override the user's --set.
NO_DOC, NO_SDPO = {"objective.w_doc": 0}, {"objective.alpha": 0}
NO_REPLAY = {"objective.beta": 0, "replay": None}
ARMS: Mapping[str, Mapping[str, Any]] = {
    "grpo": NO_DOC | NO_SDPO | NO_REPLAY,
    "+sdpo": NO_DOC | NO_REPLAY,
    "+replay": NO_DOC | NO_SDPO,
    "all": NO_DOC,
    "all+doc": {},
}
COLUMNS = (
    "arm", "reward", "gain", "95% CI", "over grpo", "95% CI", "accuracy", "95% CI", "tokens",
    "time", "teachers",
)  # fmt: skip
CAPTION = (
    "reward: mean of the last quarter of the steps; gain: that less the first step's, which is "
    "untrained's; over grpo: that less the reward of grpo's run of the same seed",
    "accuracy: greedy, held out; time: of a whole run, from its start to its evaluation",
    "means over the seeds, with Student's 95% interval; tokens, time and the teachers' dollars are "
    "those of one run",
)
DOCUMENT = "objective.w_doc is 0 in all arms but all+doc, which has the config's own"


def planned(
    mesh: str, *, overlays: Sequence[str], sets: Sequence[str], seeds: int
) -> tuple[Trial, ...]:
    """Return every run's trial, the arms of a seed in sequence; the first seed is the config's.
    Raises SpecError for a mesh without episodes, with a zero-weight channel, or without the arm
    on_policy."""
    sets = (*PLAIN, *sets)
    base = load_spec(mesh, overlays=overlays, sets=(*sweep.PLAIN, *sets))
    learn, objective = base.spec.learn, base.spec.learn.objective
    if learn.episodes is None:
        raise SpecError(
            f"an ablation needs episodes, which its arms learn from: {mesh} has none; add the "
            "section episodes to its config, or ablate meshes/three_channels.yaml"
        )
    for key in ("w_rl", "alpha", "beta"):
        if getattr(objective, key) == 0:
            raise SpecError(
                f"objective.{key} must be > 0 for an ablation, which takes the channel away: "
                f"got 0 at {base.place(f'objective.{key}')}; set it"
            )
    if "on_policy" not in learn.evaluate.arms:
        raise SpecError(
            "evaluate.arms must hold on_policy for an ablation, which compares it: got "
            f"{', '.join(learn.evaluate.arms)} at {base.place('evaluate.arms')}; add it"
        )
    arms = [arm for arm in ARMS if arm != "all+doc" or objective.w_doc]
    variants = [{"set": ARMS[arm], "arms": {"on_policy": arm}} for arm in arms]
    return sweep.planned(
        SweepSpec.model_validate({"name": "ablate", "mesh": mesh, "variants": variants}),
        mesh, overlays=overlays, sets=sets, seeds=seeds, first_seed=learn.train.seed,
        evaluated=learn.evaluate.arms,
    )  # fmt: skip


def ablate(
    plan: Sequence[Trial], root: Path, runner: Runner, say: Callable[[str], None]
) -> tuple[TableSection, ...]:
    """Run the unfinished trials, write ablation.json and return the tables. `say` gets a line as
    each run begins and ends. Raises RunError when a run fails, or when the arms of a seed begin
    with different episodes."""
    name = plan[0].spec.mesh.name
    record = root / f"ablate-{name}" / "ablation.json"
    first: dict[int, RunDirectory] = {}  # seed -> its first run
    done: dict[str, RunDirectory] = {}
    for trial, directory in runs_of(plan, root, record, runner, say):
        require_same_start(first.setdefault(trial.seed, directory), directory)
        done[trial.name] = directory
    runs = {"untrained": [untrained_of(first[seed]) for seed in sorted(first)]}
    for trial in plan:
        runs.setdefault(trial.arm, []).append(figures_of(done[trial.name]))
    arms = summarise(runs)
    caption = (*CAPTION, DOCUMENT) if "all+doc" in arms else CAPTION
    write_record(
        record, mesh=name, runs=read_runs(record), seeds=sorted(first), caption=caption, arms=arms
    )
    title = f"ablation of {name}, {len(first)} seed{'s' if len(first) > 1 else ''}"
    rows = tuple((arm, *_cells(figures)) for arm, figures in arms.items())
    notes = TableSection("how to read it", ("",), tuple((line,) for line in caption))
    return TableSection(title, COLUMNS, rows), notes


def require_same_start(a: RunDirectory, b: RunDirectory) -> None:
    """Raise RunError when the first step's episodes, sampled before any training, differ in a token
    or in the bounds of their turns."""
    if a == b:
        return
    ours, theirs = _first_step(a), _first_step(b)
    for episode in sorted({*ours, *theirs}):
        if ours.get(episode) != theirs.get(episode):
            raise RunError(
                f"runs of one seed must begin with the same episodes: {episode} differs between "
                f"{a.id} and {b.id}; move one of the two away and ablate again"
            )


def _first_step(directory: RunDirectory) -> dict[str, Any]:
    """Return task id -> the token ids of its branches, and its turns' bounds."""
    rows = takewhile(lambda row: row["step"] == 1, iter_rows(directory.episodes))
    return {
        row["task"]["id"]: (
            row["branches"],
            [(turn["branch"], turn["start"], turn["stop"]) for turn in row["turns"]],
        )
        for row in rows
    }


def figures_of(directory: RunDirectory) -> dict[str, float]:
    """Return reward, gain, accuracy, tokens, wall_seconds and dollars of one finished run. Dollars
    are the spend ledger's: a vote reused from the ledger cost nothing, and a call that was too late
    for its vote was paid."""
    results = directory.read_results() or {}
    first, last = _rewards(directory)
    return {
        "reward": last,
        "gain": last - first,
        "accuracy": results["arms"]["on_policy"]["accuracy"],
        "tokens": results["tokens_trained"]["on_policy"],
        "wall_seconds": results["wall_seconds"],
        "dollars": math.fsum(RunSpending(directory.ledger).total()["dollars"].values()),
    }


def untrained_of(directory: RunDirectory) -> dict[str, float]:
    """Return the starting point of a seed's runs: the reward of the first step's episodes, and the
    accuracy where the run measured it."""
    arms = (directory.read_results() or {})["arms"]
    measured = {"accuracy": arms["untrained"]["accuracy"]} if "untrained" in arms else {}
    return {"reward": _rewards(directory)[0], **measured}


def _rewards(directory: RunDirectory) -> tuple[float, float]:
    """Return the mean reward of the first step's episodes, and of the last quarter of the steps."""
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
    """Return arm -> figure -> values, one per seed, their mean, and ci95, None with a single seed.

    `runs` holds the figures of every run of an arm, seed by seed. `over_grpo` compares rewards
    within a seed, whose arms had the same tasks: its interval is narrower than those of two
    rewards.
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


def _cells(figures: Mapping[str, Any]) -> tuple[str, ...]:
    def mean(figure: str, shown: Callable[[float], str]) -> str:
        return shown(figures[figure]["mean"]) if figure in figures else UNKNOWN

    def interval(figure: str, form: str, scale: float = 1) -> str:
        return interval_text(figures.get(figure, {}).get("ci95"), form, scale)

    return (
        mean("reward", "{:.3f}".format),
        mean("gain", "{:+.3f}".format),
        interval("gain", "+.3f"),
        mean("over_grpo", "{:+.3f}".format),
        interval("over_grpo", "+.3f"),
        mean("accuracy", percent),
        interval("accuracy", ".1f", 100),
        mean("tokens", count_text),
        mean("wall_seconds", duration),
        mean("dollars", "${:.4f}".format),
    )


def command(
    mesh: str, *, overlays: Sequence[str], sets: Sequence[str], seeds: int, run_dir: Path | None
) -> tuple[TableSection, ...]:
    """Do the whole of `forge ablate`. Raises ForgeError for a bad spec and a failed run."""
    plan = planned(mesh, overlays=overlays, sets=sets, seeds=seeds)
    require_all(plan)
    root = (run_dir or Path("runs")).absolute()
    # In sequence: the table reports each arm's time.
    return ablate(plan, root, partial(run_side_by_side, at_once=1), partial(print, flush=True))
