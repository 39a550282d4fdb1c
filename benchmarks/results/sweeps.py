"""Keep the finished runs of an unfinished sweep, and bring them back elsewhere, where it goes on.

forge sweep STUDY.yaml             interrupted: some runs are finished
keep(STUDY.yaml, runs/)            each of them becomes a record, studies/NAME/ARM-SEED
restore(STUDY.yaml, runs/)         in another checkout: their run directories
forge sweep STUDY.yaml             runs the others
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks.results import records
from forge_run.experiments.sweep import planned
from forge_run.experiments.trials import Trial, read_runs, unfit, write_record
from protocols.files import REPOSITORY, json_lines, write_atomically
from protocols.spec.experiments import SweepSpec
from protocols.spec.loading import load_file
from protocols.spec.yaml_source import dump_yaml
from services.run_directory import RunDirectory


def keep(path: Path, root: Path, home: Path = records.HOME, sets: Sequence[str] = ()) -> list[Path]:
    """Record every finished run of the sweep in file `path` with these `sets`, whose runs are under
    `root`, and return the records' folders. Raises SpecError for a bad sweep, RunError for its bad
    record."""
    spec, plan = _read(path, sets)
    runs = read_runs(_record(spec, root))
    kept = []
    for trial in plan:
        if trial.name not in runs:
            continue
        directory = RunDirectory(root / trial.spec.mesh.name / runs[trial.name])
        if unfit(directory, trial) is None:
            name = _name(spec, trial)
            told = " ".join((f"forge sweep {_shown(path)}", *(f"--set {one}" for one in sets)))
            kept.append(records.collect(directory.path, name, told, home))
    return kept


def restore(
    path: Path, root: Path, home: Path = records.HOME, sets: Sequence[str] = ()
) -> list[str]:
    """Write the run directories of the sweep's records under `root` and name them in its record, so
    that `forge sweep` finds them finished; return their trials. A record of another spec than the
    sweep's is left out."""
    spec, plan = _read(path, sets)
    record = _record(spec, root)
    runs = read_runs(record)
    restored = []
    for trial in plan:
        name = _name(spec, trial)
        text = dump_yaml(trial.spec.as_dict())
        known = home / name / "spec.yaml"
        if trial.name in runs or not known.is_file():
            continue
        if known.read_text() != text.replace(f"{REPOSITORY}/", ""):
            continue
        run = str(records.whole(name, "source.json", home)["run"])
        folder = root / trial.spec.mesh.name / run
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "spec.yaml", text)
        for file in records.WHOLE:
            if (home / name / file).is_file():
                write_atomically(folder / file, (home / name / file).read_text())
        for file in records.ROWS:
            if (home / name / f"{file}.gz").is_file():
                rows = records.rows(name, file, home)
                write_atomically(folder / file, json_lines(rows))
        runs[trial.name] = run
        restored.append(trial.title)
    if restored:
        record.parent.mkdir(parents=True, exist_ok=True)
        write_record(record, mesh=plan[0].spec.mesh.name, runs=runs)
    return restored


@cache  # several tables are of one sweep, whose every trial has a spec of its own to read
def planned_trials(path: Path, sets: Sequence[str] = ()) -> tuple[tuple[str, Trial], ...]:
    """Return every trial of the sweep in file `path` with the name of its record. `sets` is a
    tuple."""
    spec, plan = _read(path, sets)
    return tuple((_name(spec, trial), trial) for trial in plan)


def _read(path: Path, sets: Sequence[str] = ()) -> tuple[SweepSpec, tuple[Trial, ...]]:
    spec = load_file(SweepSpec, path)
    return spec, planned(spec, str((path.parent / spec.mesh).resolve()), sets=sets)


def _record(spec: SweepSpec, root: Path) -> Path:
    return root / f"sweep-{spec.name}" / "sweep.json"


def _name(spec: SweepSpec, trial: Trial) -> str:
    return f"studies/{spec.name.replace('-', '_')}/{Path(trial.log).stem}"


def _shown(path: Path) -> str:
    return str(path.resolve()).removeprefix(f"{REPOSITORY}/")
