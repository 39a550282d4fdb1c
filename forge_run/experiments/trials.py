"""Run the trials of `forge sweep` and `forge ablate`, each once.

    trials -> those not finished yet, side by side -> the run of every trial

A record maps trials to runs, so an interrupted command continues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cartridge_forge.forge_run.commands import note
from cartridge_forge.forge_run.experiments.child_run import ChildRun
from cartridge_forge.forge_run.model_check import check_for_run
from cartridge_forge.forge_run.preflight import require_runnable
from cartridge_forge.forge_run.resuming import differences
from cartridge_forge.plugins.spec_files.loading import load_resolved
from cartridge_forge.plugins.watch.console import duration, shown_path
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.files import write_atomically
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.run_directory import RunDirectory


@dataclass(frozen=True)
class Trial:
    """Describe one run of several: `Trial("+replay", 1, words=("mesh.yaml", "--set", ...),
    spec=...)`. `point` is its position on a sweep's axes, `arms` maps the run's arms to their shown
    names."""

    arm: str
    seed: int
    words: tuple[str, ...]
    spec: RunSpec
    point: dict[str, Any] = field(default_factory=dict)
    arms: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.arm}/{self.seed}"

    @property
    def title(self) -> str:
        return f"{self.arm}, seed {self.seed}"

    @property
    def log(self) -> str:
        """Return the name of the file for its run's output."""
        name = f"{self.arm}-{self.seed}"
        return "".join(c if c.isalnum() or c in "+=.-" else "_" for c in name) + ".log"


Runner = Callable[
    [Sequence[ChildRun], Callable[[ChildRun], None]], Iterator[tuple[ChildRun, str]]
]  # fmt: skip
"""Run children and yield each with its run's id as it ends; call back as each one begins."""


def runs_of(
    plan: Sequence[Trial], root: Path, record: Path, runner: Runner, say: Callable[[str], None]
) -> Iterator[tuple[Trial, RunDirectory]]:
    """Yield the finished run of every trial, those of earlier calls first, and keep `record`
    current. Raises RunError for a malformed record, and when a run fails or is not the trial's."""
    runs = read_runs(record)
    name = plan[0].spec.mesh.name
    record.parent.mkdir(parents=True, exist_ok=True)
    where = {t.title: f"[{i}/{len(plan)}] {t.title}:" for i, t in enumerate(plan, start=1)}
    start_times: dict[str, float] = {}
    waiting: dict[ChildRun, Trial] = {}
    for trial in plan:
        directory = RunDirectory(root / name / runs[trial.name]) if trial.name in runs else None
        if directory is not None and (fault := unfit(directory, trial)):
            say(f"{where[trial.title]} run {directory.id} {fault}")
            directory = None
        if directory is None:
            words = (*trial.words, "--run-dir", str(root))
            waiting[ChildRun(trial.title, words, record.parent / trial.log)] = trial
        else:
            say(f"{where[trial.title]} finished before, run {directory.id}")
            yield trial, directory

    def began(child: ChildRun) -> None:
        start_times[child.name] = time.monotonic()
        say(f"{where[child.name]} runs, see {shown_path(child.log)}")

    for child, run_id in runner(list(waiting), began):
        trial, directory = waiting[child], RunDirectory(root / name / run_id)
        if fault := unfit(directory, trial):
            raise RunError(f"{trial.name}: run {directory.id} {fault}; give the command again")
        runs[trial.name] = directory.id
        write_record(record, mesh=name, runs=runs)
        seconds = time.monotonic() - start_times[child.name]
        say(f"{where[child.name]} finished in {duration(seconds)}, run {directory.id}")
        yield trial, directory


def require_all(plan: Sequence[Trial]) -> None:
    """Raise SpecError for a trial that cannot run here, and DataError for a model that is not
    computed right, before any begins."""
    from cartridge_forge.plugins.watch.telemetry.hub import require_sinks

    for trial in plan:
        require_runnable(trial.spec)
        require_sinks(trial.spec)
        for line in check_for_run(trial.spec):
            note(line)


def unfit(directory: RunDirectory, trial: Trial) -> str | None:
    """Return why the run is not this trial's finished run; None when it is."""
    results = directory.read_results()
    if results is None or results.get("status") != "finished":
        return "did not finish, or was moved away"
    recorded = load_resolved(directory.spec).as_dict()
    changed = differences(recorded, trial.spec.as_dict())
    if trial.spec.learn.cartridge.frozen is None:  # a run takes its starting cartridges' number
        changed = [key for key in changed if key != "learn.cartridge.frozen"]
    return f"was made with another spec ({', '.join(changed)})" if changed else None


def read_runs(record: Path) -> dict[str, str]:
    """Return trial name -> run id; empty without a record. Raises RunError for a bad record."""
    if not record.is_file():
        return {}
    try:
        runs = json.loads(record.read_bytes())["runs"]
        return {str(name): str(run) for name, run in runs.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{record} must be the record of earlier runs: {type(error).__name__}; move it away "
            "to run all anew"
        ) from error


def write_record(record: Path, **values: Any) -> None:
    write_atomically(record, json.dumps({"schema": 1, **values}, indent=2, allow_nan=False) + "\n")
