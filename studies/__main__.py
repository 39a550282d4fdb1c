"""Keep the raw results of published figures, and check the pages against them.

python -m studies check                        tables that differ from their records
python -m studies write                        write those tables anew
python -m studies list STUDY                   what a study's archive has
python -m studies keep SWEEP.yaml [--set ...]  the sweep's finished runs, from runs/
python -m studies restore SWEEP.yaml [--set ...]
                                               and back, so that `forge sweep` goes on
python -m studies collect RUN --as STUDY/NAME --command "forge-run MESH.yaml"
python -m studies add STUDY RECORD.json...     records of benchmarks
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cartridge_forge.forge_run.experiments.sweep import planned
from cartridge_forge.forge_run.experiments.trials import Trial, read_runs, unfit, write_record
from cartridge_forge.plugins.evaluate.spec import SweepSpec
from cartridge_forge.plugins.spec_files.loading import load_file
from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml
from cartridge_forge.protocols.errors import ForgeError
from cartridge_forge.protocols.files import REPOSITORY
from cartridge_forge.services.run_directory import RunDirectory
from studies import archive, pages
from studies.archive import KeptRun


def main() -> int:
    """Run one of the commands, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m studies")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("check", help="list tables that differ from their records")
    verbs.add_parser("write", help="write the recorded tables anew")
    contents = verbs.add_parser("list", help="list what a study's archive has")
    contents.add_argument("study")
    for verb, action in (("keep", "keep"), ("restore", "bring back")):
        of_sweep = verbs.add_parser(verb, help=f"{action} the finished runs of a sweep")
        of_sweep.add_argument("sweep", type=Path)
        of_sweep.add_argument("--run-dir", type=Path, default=Path("runs"))
        of_sweep.add_argument("--set", action="append", default=[], dest="sets")
    collect = verbs.add_parser("collect", help="keep what a finished run measured")
    collect.add_argument("run", type=Path)
    collect.add_argument("--as", dest="name", required=True, metavar="STUDY/NAME")
    collect.add_argument("--command", required=True, help="how the run was made")
    add = verbs.add_parser("add", help="keep records of benchmarks")
    add.add_argument("study")
    add.add_argument("records", type=Path, nargs="+")
    try:
        return _execute(parser.parse_args())
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _execute(options: argparse.Namespace) -> int:
    if options.verb == "check":
        faults = [fault for one in pages.recorded() for fault in pages.differing(one)]
        faults += pages.unmarked()
        print("\n".join(faults) or "every recorded table is that of its record")
        return 1 if faults else 0
    if options.verb == "write":
        print("\n".join(pages.write()) or "nothing to write")
    elif options.verb == "list":
        for name, data in archive.members(options.study).items():
            print(f"{len(data):>9,}  {name}")
    elif options.verb == "collect":
        study, _, name = options.name.partition("/")
        run = KeptRun(name, "", 0, {}, options.command, options.run.resolve().name)
        print(archive.keep(study, [(run, options.run)]))
    elif options.verb == "add":
        files = {path.name: path.read_bytes() for path in options.records}
        print(archive.pack(options.study, archive.members(options.study) | files))
    else:
        act = keep if options.verb == "keep" else restore
        names = act(options.sweep, options.run_dir, sets=options.sets)
        print("\n".join(names) or "nothing new")
    return 0


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
        spec_text = dump_yaml(trial.spec.as_dict())
        if archive.text(study, f"{name}/spec.yaml") != spec_text.replace(f"{REPOSITORY}/", ""):
            continue
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


def _read(path: Path, sets: Sequence[str]) -> tuple[SweepSpec, tuple[Trial, ...]]:
    spec = load_file(SweepSpec, path)
    return spec, planned(spec, str((path.parent / spec.mesh).resolve()), sets=sets)


def _record(spec: SweepSpec, root: Path) -> Path:
    return root / f"sweep-{spec.name}" / "sweep.json"


if __name__ == "__main__":
    sys.exit(main())
