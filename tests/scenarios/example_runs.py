"""Run an example's mesh file for a few steps, with a model that is hardly trained, or a copy of it
with the clerk."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cartridge_forge.protocols.files import iter_rows
from cartridge_forge.services.run_directory import RunDirectory

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHORT = (
    "train.steps=2", "train.warmup_steps=1", "episodes.tasks=2", "episodes.group=4",
    "evaluate.arms=[on_policy]", "evaluate.questions=4", "evaluate.sampled=false",
)  # fmt: skip

BY_CLERK: dict[str, Any] = {
    "model.path": str(EXAMPLES.parent / "models" / "clinic-clerk"), "train.steps": 1,
    "train.warmup_steps": 0, "episodes.tasks": 2, "episodes.group": 4,
    "evaluate.arms": ["on_policy"], "evaluate.questions": 4, "evaluate.sampled": False,
}  # fmt: skip


def ran(name: str, folder: Path, sets: Mapping[str, str]) -> RunDirectory:
    """Run two short steps of an example, with a model of twenty steps."""
    model = folder / "model"
    _called("-m", f"examples.{name}.make_model", "--steps", "20", "--out", str(model))
    return _run(name, folder, [*SHORT, f"model.path={model}", *_given(sets)])


def ran_whole(name: str, folder: Path, sets: Mapping[str, str]) -> RunDirectory:
    """Run an example as its README says."""
    model = folder / "model"
    _called("-m", f"examples.{name}.make_model", "--out", str(model))
    return _run(name, folder, [f"model.path={model}", *_given(sets)])


def _given(sets: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in sets.items()]


def _run(name: str, folder: Path, sets: Sequence[str]) -> RunDirectory:
    program = (
        "import sys; from cartridge_forge.forge_run.cli import forge_run; sys.exit(forge_run())"
    )
    mesh = str(EXAMPLES / name / "mesh.yaml")
    _called("-c", program, mesh, "--run-dir", str(folder), *(f"--set={s}" for s in sets))
    return RunDirectory((folder / name / "latest").resolve())


def _called(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], timeout=1500, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def counts(run: RunDirectory) -> list[dict[str, Any]]:
    return [row["episodes"] for row in iter_rows(run.metrics)]


def copied(name: str, folder: Path) -> Path:
    """Copy an example without what its script makes; return the copy's mesh file."""
    shutil.copytree(
        EXAMPLES / name,
        folder,
        ignore=shutil.ignore_patterns("model", "problems.[jp]*", "__pycache__"),
    )
    return folder / "mesh.yaml"


def by_clerk(mesh: Path, run_dir: Path, *extra: str, **sets: Any) -> list[str]:
    """Return the command of one short step with the shipped clerk."""
    code = "import sys; from cartridge_forge.forge_run.cli import forge_run; sys.exit(forge_run())"
    words = [sys.executable, "-c", code, str(mesh), "--run-dir", str(run_dir), *extra]
    for key, value in {**BY_CLERK, **sets}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return words
