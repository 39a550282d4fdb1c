"""A sweep that was begun in one place goes on in another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cartridge_forge.forge_run.experiments.sweep import planned
from cartridge_forge.forge_run.experiments.trials import read_runs, unfit, write_record
from cartridge_forge.plugins.evaluate.spec import SweepSpec
from cartridge_forge.plugins.spec_files.loading import load_file
from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml
from cartridge_forge.protocols.files import REPOSITORY
from cartridge_forge.services.run_directory import RunDirectory
from studies import archive, sweeps

SWEEP = """\
name: two-rates
mesh: {mesh}
seeds: 2
seed_keys: [train.seed]
reference: rate
set: {{train.lr: {rate}, evaluate.arms: [on_policy]}}
variants:
  - arms: {{on_policy: rate}}
"""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "HOME", tmp_path)


def written(folder: Path, rate: float) -> Path:
    path = folder / "rates" / "two.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(SWEEP.format(mesh=REPOSITORY / "meshes" / "longhealth.yaml", rate=rate))
    return path


def finish_first(path: Path, root: Path, *sets: str) -> None:
    """Write the run of the sweep's first trial, and begin that of the second."""
    spec = load_file(SweepSpec, path)
    plan = planned(spec, spec.mesh, sets=sets)
    runs = {}
    for trial, status in zip(plan, ("finished", "stopped"), strict=True):
        run = RunDirectory.create(root, "longhealth", dump_yaml(trial.spec.as_dict()))
        (run.path / "results.json").write_text(json.dumps({"status": status}))
        (run.path / "answers.jsonl").write_text('{"right": 1.0}\n')
        (run.path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
        (run.path / "eval.json").write_text(json.dumps({"model": f"{REPOSITORY}/models/a"}))
        runs[trial.name] = run.id
    (root / "sweep-two-rates").mkdir()
    write_record(root / "sweep-two-rates" / "sweep.json", mesh="longhealth", runs=runs)


def test_the_finished_runs_of_a_sweep_come_back_in_another_folder(tmp_path: Path) -> None:
    path = written(tmp_path, 0.1)
    finish_first(path, tmp_path / "here")
    assert sweeps.keep(path, tmp_path / "here") == ["two/rate-0"]
    (run,) = archive.runs("rates", "two")
    assert (run.seed, run.arms, run.reference) == (0, {"on_policy": "rate"}, "rate")
    there = tmp_path / "there"
    assert sweeps.restore(path, there) == ["rate, seed 0"]
    spec = load_file(SweepSpec, path)
    first, _ = planned(spec, spec.mesh)
    runs = read_runs(there / "sweep-two-rates" / "sweep.json")
    assert list(runs) == [first.name]
    directory = RunDirectory(there / "longhealth" / runs[first.name])
    assert unfit(directory, first) is None
    assert (directory.path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    # What was measured of the run afterwards comes back too, and names no folder of this machine.
    assert json.loads((directory.path / "eval.json").read_text()) == {"model": "models/a"}
    assert sweeps.restore(path, there) == []


def test_a_sweep_is_kept_and_restored_by_what_was_set_on_its_command_line(tmp_path: Path) -> None:
    path, rows = written(tmp_path, 0.1), "data.patients=3"
    finish_first(path, tmp_path / "here", rows)
    assert sweeps.keep(path, tmp_path / "here") == []
    assert sweeps.keep(path, tmp_path / "here", sets=(rows,)) == ["two/rate-0"]
    assert archive.runs("rates")[0].command.endswith("two.yaml --set data.patients=3")
    assert sweeps.restore(path, tmp_path / "there") == []
    assert sweeps.restore(path, tmp_path / "there", sets=(rows,)) == ["rate, seed 0"]


def test_a_run_of_other_settings_is_not_restored(tmp_path: Path) -> None:
    path = written(tmp_path, 0.1)
    finish_first(path, tmp_path / "here")
    sweeps.keep(path, tmp_path / "here")
    assert sweeps.restore(written(tmp_path, 0.2), tmp_path / "there") == []
    assert not (tmp_path / "there").exists()


def test_a_run_kept_before_a_key_came_is_restored(tmp_path: Path) -> None:
    path, spec = written(tmp_path, 0.1), "two/rate-0/spec.yaml"
    finish_first(path, tmp_path / "here")
    sweeps.keep(path, tmp_path / "here")
    lines = archive.text("rates", spec).splitlines(keepends=True)
    before = "".join(line for line in lines if "retriever:" not in line)
    assert len(before) < len("".join(lines))
    archive.pack("rates", archive.members("rates") | {spec: before.encode()})
    assert sweeps.restore(path, tmp_path / "there") == ["rate, seed 0"]


def test_nothing_is_kept_of_a_sweep_that_never_ran(tmp_path: Path) -> None:
    assert sweeps.keep(written(tmp_path, 0.1), tmp_path / "here") == []
    assert archive.members("rates") == {}
