"""Keep the finished runs of an unfinished sweep, and bring them back elsewhere, where it goes on.

forge sweep studies/real/sweep.yaml    interrupted: some runs are finished, under runs/
keep(studies/real/sweep.yaml, runs/)   each of them joins studies/real/results.zip
restore(.../sweep.yaml, runs/)         in another checkout: their run directories
forge sweep studies/real/sweep.yaml    runs the others
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cartridge_forge.forge_run.experiments.sweep import planned
from cartridge_forge.forge_run.experiments.trials import Trial, read_runs, unfit, write_record
from cartridge_forge.plugins.evaluate.spec import SweepSpec
from cartridge_forge.plugins.spec_files.loading import load_file, load_resolved
from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.files import REPOSITORY
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.run_directory import RunDirectory
from studies import archive
from studies.archive import KeptRun


def keep(path: Path, root: Path, sets: Sequence[str] = ()) -> list[str]:
    """Add every finished run of the sweep in file studies/STUDY/SWEEP.yaml with these `sets`, whose
    runs are under `root`, to the study's archive; return the names of these runs.

    Raises SpecError for a bad sweep, RunError for a bad record of it."""
    spec, plan = _read(path, sets)
    runs = read_runs(_record(spec, root))
    sweep_path = str(path.resolve()).removeprefix(f"{REPOSITORY}/")
    command = " ".join((f"forge sweep {sweep_path}", *(f"--set {one}" for one in sets)))
    finished = []
    for name, trial in _named(path, plan):
        if trial.name not in runs:
            continue
        directory = RunDirectory(root / trial.spec.mesh.name / runs[trial.name])
        if unfit(directory, trial) is None:
            run = KeptRun(
                name, path.stem, trial.seed, dict(trial.arms), command, directory.id, spec.reference
            )
            finished.append((run, directory.path))
    if finished:
        archive.keep(path.resolve().parent.name, finished)
    return [run.name for run, _ in finished]


def restore(path: Path, root: Path, sets: Sequence[str] = ()) -> list[str]:
    """Write the run directories of the sweep's kept runs under `root` and name them in its record,
    so that `forge sweep` finds them finished; return their trials. A run of another spec than the
    sweep's is left out."""
    spec, plan = _read(path, sets)
    study, record = path.resolve().parent.name, _record(spec, root)
    runs = read_runs(record)
    archived = {run.name: run for run in archive.runs(study, path.stem)}
    restored = []
    for name, trial in _named(path, plan):
        if trial.name in runs or name not in archived:
            continue
        if _kept_spec(study, name) != _portable(trial.spec):
            continue
        spec_text = dump_yaml(trial.spec.as_dict())
        folder = root / trial.spec.mesh.name / archived[name].run
        archive.unpack(study, archived[name], folder, spec_text)
        runs[trial.name] = archived[name].run
        restored.append(trial.title)
    if restored:
        record.parent.mkdir(parents=True, exist_ok=True)
        write_record(record, mesh=plan[0].spec.mesh.name, runs=runs)
    return restored


def _named(path: Path, plan: Sequence[Trial]) -> Iterator[tuple[str, Trial]]:
    """Yield each trial with the name of its run in the archive."""
    for trial in plan:
        yield f"{path.stem}/{Path(trial.log).stem}", trial


def _kept_spec(study: str, name: str) -> str | None:
    """Return the spec of a kept run as this version writes it, with the keys that came since at
    their defaults; None where this version cannot read it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "spec.yaml"
        file.write_text(archive.text(study, f"{name}/spec.yaml"))
        try:
            return _portable(load_resolved(file)).replace(f"{folder}/", "")
        except SpecError:
            return None


def _portable(spec: RunSpec) -> str:
    return dump_yaml(spec.as_dict()).replace(f"{REPOSITORY}/", "")


def _read(path: Path, sets: Sequence[str]) -> tuple[SweepSpec, tuple[Trial, ...]]:
    spec = load_file(SweepSpec, path)
    return spec, planned(spec, str((path.parent / spec.mesh).resolve()), sets=sets)


def _record(spec: SweepSpec, root: Path) -> Path:
    return root / f"sweep-{spec.name}" / "sweep.json"
