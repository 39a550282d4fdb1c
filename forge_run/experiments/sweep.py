"""Run a mesh over axes, training variants and seeds: `forge sweep SWEEP.yaml`.

    configs/sweep_compression.yaml   axes x variants x seeds -> trials -> runs, side by side
    runs/longhealth/<run>/           every run, as `forge-run` keeps it
    runs/sweep-compression/          sweep.json, sweep.md, sweep.html, its plots as SVG files,
                                     the output of each run

An interrupted sweep continues: finished runs are not repeated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cartridge_forge.forge_run.experiments.child_run import run_side_by_side
from cartridge_forge.forge_run.experiments.table import (
    SweepRow,
    gather,
    markdown,
    page_of,
    plots,
    table,
)
from cartridge_forge.forge_run.experiments.trials import (
    Runner,
    Trial,
    read_runs,
    require_all,
    runs_of,
    write_record,
)
from cartridge_forge.plugins.cluster.manifests.sizing import samples_of
from cartridge_forge.plugins.evaluate.spec import SweepSpec
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.spec_files.keys import named_config
from cartridge_forge.plugins.spec_files.loading import load_file, load_spec
from cartridge_forge.plugins.statistics.formatting import TableSection, count_text
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.files import write_atomically
from cartridge_forge.services.run_directory import RunDirectory

# Keys that save time and do not change the table. The sweep's own keys override them.
PLAIN = ("evaluate.probe_every=0", "evaluate.sampled=false")


def planned(
    sweep: SweepSpec,
    mesh: str,
    *,
    overlays: Sequence[str] = (),
    sets: Sequence[str] = (),
    seeds: int | None = None,
) -> tuple[Trial, ...]:
    """Return every run's trial, those of a seed in sequence.

    `overlays` and `sets` are the command line's. Raises SpecError for a key or a value that a run
    would refuse, and for a reference that no variant names.
    """
    names = [name for variant in sweep.variants for name in variant.arms.values()]
    if sweep.reference is not None and sweep.reference not in names:
        raise SpecError(
            f"reference must be an arm of the sweep: got {sweep.reference}; name one of "
            f"{', '.join(names)}"
        )
    if seeds is not None and seeds < 1:
        raise SpecError(f"--seeds must be >= 1: got {seeds}; 3 or more give an interval of use")
    trials = []
    for seed in range(sweep.first_seed, sweep.first_seed + (seeds or sweep.seeds)):
        for point in sweep.points():
            for variant in sweep.variants:
                arms_and_seed: dict[str, Any] = {"evaluate.arms": list(variant.arms)}
                arms_and_seed |= dict.fromkeys(sweep.seed_keys, seed)
                keys: dict[str, Any] = {}
                for layer in (sweep.set, variant.set, point, arms_and_seed):
                    keys = {k: v for k, v in keys.items() if k not in layer} | dict(layer)
                texts = (*PLAIN, *sets, *(f"{k}={json.dumps(v)}" for k, v in keys.items()))
                where = [f"{k.rpartition('.')[2]}={json.dumps(v)}" for k, v in point.items()]
                arm = " ".join([*where, "+".join(variant.arms.values())])
                words = [mesh, *(word for overlay in overlays for word in ("--config", overlay))]
                words += [word for text in texts for word in ("--set", text)]
                spec = load_spec(mesh, overlays=overlays, sets=texts).spec
                arms = tuple(variant.arms.items())
                trials.append(Trial(arm, seed, tuple(words), spec, point, arms))
    return tuple(trials)


def sweep(
    spec: SweepSpec, plan: Sequence[Trial], root: Path, runner: Runner, say: Callable[[str], None]
) -> list[SweepRow]:
    """Run the unfinished trials, measure the sweep's frontier over each, write the results and
    return a row of every arm. Raises RunError when a run fails; finished runs are kept."""
    home = root / f"sweep-{spec.name}"
    record = home / "sweep.json"
    runs: dict[str, RunDirectory] = {}
    for trial, run in runs_of(plan, root, record, runner, say):
        runs[trial.name] = run
        if spec.frontier is not None:
            from cartridge_forge.forge_run.commands.frontier import (  # which import torch
                measure,
                measured,
            )

            if not measured(run, spec.frontier):
                measure(run, spec.frontier, say)
    rows = gather((trial, runs[trial.name]) for trial in plan)
    write_record(
        record, mesh=plan[0].spec.mesh.name, runs=read_runs(record), name=spec.name,
        reference=spec.reference, seeds=sorted({t.seed for t in plan}),
        rows=[row.as_dict() for row in rows],
    )  # fmt: skip
    write_atomically(home / "sweep.md", markdown(spec, rows))
    write_atomically(home / "sweep.html", page_of(spec, rows))
    for plot in plots(spec, rows):
        write_atomically(home / plot.file, plot.alone)
    return rows


def at_once(plan: Sequence[Trial], cores: int) -> int:
    """Return the number of runs side by side: cores over the most threads of any role."""
    threads = max(role.threads for t in plan for role in t.spec.mesh.roles.values())
    return max(1, cores // threads)


def command(
    path: str, *, sets: Sequence[str], seeds: int | None, jobs: int | None, run_dir: Path | None,
    dry_run: bool,
) -> tuple[TableSection, ...]:  # fmt: skip
    """Do the whole of `forge sweep`; `path` may be a shipped one's name. Raises ForgeError for a
    bad spec and a failed run."""
    file, _ = named_config(path, "sweep", "sweep_*.yaml")
    spec = load_file(SweepSpec, file)
    mesh = str((file.parent / spec.mesh).resolve())
    plan = planned(spec, mesh, sets=sets, seeds=seeds)
    require_all(plan)
    if jobs is not None and jobs < 1:
        raise SpecError(f"--jobs must be >= 1: got {jobs}")
    jobs = jobs or at_once(plan, os.cpu_count() or 1)
    if dry_run:
        return plan_sections(spec, plan, jobs)
    root = (run_dir or Path("runs")).absolute()
    runner = partial(run_side_by_side, at_once=jobs)
    return table(spec, sweep(spec, plan, root, runner, partial(print, flush=True)))


def plan_sections(spec: SweepSpec, plan: Sequence[Trial], jobs: int) -> tuple[TableSection, ...]:
    """Return tables of the planned runs and their budget."""
    learn = [trial.spec.learn for trial in plan]
    budget = (
        ("runs", str(len(plan))),
        ("side by side", str(jobs)),
        ("optimiser steps", count_text(sum(x.train.steps for x in learn))),
        ("responses", count_text(sum(x.train.steps * samples_of(RsaLearn.of(x)) for x in learn))),
    )
    rows = tuple((t.arm, str(t.seed), str(t.spec.learn.train.steps)) for t in plan)
    return (
        TableSection(f"sweep {spec.name}", ("", ""), budget),
        TableSection("runs", ("arm", "seed", "steps"), rows),
    )
