"""`forge ablate MESH.yaml`: what each channel adds, and what it costs.

The same seeds for every arm, one run after the other; the first four are two by two:

    grpo       the policy gradient alone
    +sdpo      and hint distillation
    +replay    and the teachers' preferences in its place
    all        both
    all+doc    and document distillation, where the config weighs it

The arms of one seed begin with the same episodes, which is checked, so they differ by their
training alone. What is finished is not run again: an interrupted ablation goes on where it was.

    runs/three_channels/20260726T101530Z-3fa9/    every run, as `forge run` keeps it
    runs/ablate-three_channels/ablation.json      arm and seed -> run; at the end the figures
    runs/ablate-three_channels/grpo-0.log         what that run printed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from forge_run.ablation_table import caption, figures_of, summarise, table, untrained_of
from forge_run.figures import Section
from forge_run.trials import Runner, Trial, apart, read_runs, runs_of, write_record
from protocols.errors import RunError, SpecError
from protocols.files import iter_rows
from protocols.spec_loading import load_spec
from services.rundir import RunDirectory

# What costs time and gives the table nothing. Under the user's --set, which may ask for it.
PLAIN = (
    "objective.compare_every=0",
    "evaluate.arms=[untrained, on_policy]",
    "evaluate.probe_every=0",
    "evaluate.sampled=false",
)
# What an arm takes away. Over the user's --set, or it would not be that arm.
ARMS: Mapping[str, tuple[str, ...]] = {
    "grpo": ("objective.w_doc=0", "objective.alpha=0", "objective.beta=0", "replay="),
    "+sdpo": ("objective.w_doc=0", "objective.beta=0", "replay="),
    "+replay": ("objective.w_doc=0", "objective.alpha=0"),
    "all": ("objective.w_doc=0",),
    "all+doc": (),
}


def trials(
    mesh: str, *, overlays: Sequence[str], sets: Sequence[str], seeds: int
) -> tuple[Trial, ...]:
    """Every run of the ablation, the arms of a seed after one another; the first seed is the
    config's. Raises SpecError for a mesh whose channels cannot be taken apart."""
    sets = (*PLAIN, *sets)
    base = load_spec(mesh, overlays=overlays, sets=sets)
    learn, objective = base.spec.learn, base.spec.learn.objective
    if seeds < 1:
        raise SpecError(f"--seeds must be >= 1: got {seeds}; 3 or more give an interval of use")
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
    found = []
    for seed in range(learn.train.seed, learn.train.seed + seeds):
        for arm, taken in ARMS.items():
            if arm == "all+doc" and objective.w_doc == 0:
                continue
            all_sets = (*sets, *taken, f"train.seed={seed}")
            spec = load_spec(mesh, overlays=overlays, sets=all_sets).spec
            found.append(Trial(arm, seed, all_sets, spec))
    return tuple(found)


def ablate(
    plan: Sequence[Trial], root: Path, runner: Runner, say: Callable[[str], None]
) -> tuple[Section, ...]:
    """Run what is not finished yet, write ablation.json and return the table; `say` is told of
    every run as it begins and ends.

    Raises RunError when a run fails, or when the arms of a seed begin with other episodes.
    """
    name = plan[0].spec.mesh.name
    record = root / f"ablate-{name}" / "ablation.json"
    first: dict[int, RunDirectory] = {}  # seed -> the run that its others begin like
    done: dict[str, RunDirectory] = {}
    for trial, directory in runs_of(plan, root, record, runner, say):
        require_same_start(first.setdefault(trial.seed, directory), directory)
        done[trial.name] = directory
    arms: dict[str, list[RunDirectory]] = {}
    for trial in plan:
        arms.setdefault(trial.arm, []).append(done[trial.name])
    figures = summarise(
        {"untrained": [untrained_of(first[seed]) for seed in sorted(first)]}
        | {arm: [figures_of(d) for d in each] for arm, each in arms.items()}
    )
    write_record(
        record, mesh=name, runs=read_runs(record), seeds=sorted(first), caption=caption(figures),
        arms=figures,
    )  # fmt: skip
    return table(name, figures)


def require_same_start(a: RunDirectory, b: RunDirectory) -> None:
    """Raise RunError when the episodes of the first step, sampled before anything was trained,
    differ in a token or in where their turns lie."""
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
    """Task id -> the token ids of its branches, and the turns in them."""
    rows = takewhile(lambda row: row["step"] == 1, iter_rows(directory.episodes))
    return {
        row["task"]["id"]: (
            row["branches"],
            [(turn["branch"], turn["start"], turn["stop"]) for turn in row["turns"]],
        )
        for row in rows
    }


def command(
    mesh: str, *, overlays: Sequence[str], sets: Sequence[str], seeds: int, run_dir: Path | None
) -> tuple[Section, ...]:
    """The whole of `forge ablate`. Raises ForgeError for a bad spec and for a run that failed."""
    from forge_run.runnable import require_runnable
    from services.telemetry.hub import require_sinks

    plan = trials(mesh, overlays=overlays, sets=sets, seeds=seeds)
    for trial in plan:
        require_runnable(trial.spec)
        require_sinks(trial.spec)
    root = (run_dir or Path("runs")).absolute()

    # One after the other: an arm's time is a figure of the table.
    runner = apart(mesh, overlays, root, at_once=1)
    return ablate(plan, root, runner, partial(print, flush=True))
