"""`--resume` writes nothing before its checks: not into a finished run, and not where the model has
other weights than those that the run began with."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from small_run import ROOT, Finished, command, latest, run_to_end, running

MAY_GROW = {"events.jsonl", "trace.json", ".lease", "report.html"}  # of a run that did not finish


def digests(path: Path) -> dict[str, str]:
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def test_a_finished_run_is_not_written_to(finished: Finished, tmp_path: Path) -> None:
    run = tmp_path / "longhealth" / finished.path.name
    shutil.copytree(finished.path, run)
    (run.parent / "latest").symlink_to(run.name)
    before = digests(run)
    process = run_to_end(command(tmp_path, "--resume"))
    assert process.returncode == 0, process.stdout + process.stderr
    assert "it has finished: nothing is left to do" in " ".join(process.stdout.split())
    assert digests(run) == before


def test_other_weights_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(ROOT / "models" / "clinic-reader", model, symlinks=False)
    sets = {"model.path": str(model), "evaluate__arms": ["none", "on_policy"]}
    root = tmp_path / "runs"
    with running(command(root, **{**sets, "train__steps": 500}), root) as run:
        path = run.wait_for("on_policy", 3)
        run.stop()
    assert json.loads((path / "results.json").read_text())["status"] == "stopped"
    (weights,) = model.glob("*.safetensors")
    tensors = load_file(weights)
    name = min(tensors)
    save_file({**tensors, name: tensors[name] + torch.ones_like(tensors[name])}, weights)
    before = digests(path)
    process = run_to_end(command(root, "--resume", **{**sets, "train__steps": 500}))
    assert process.returncode == 2
    assert "made with other base weights" in " ".join((process.stdout + process.stderr).split())
    after = digests(latest(root))
    changed = {file for file in {*before, *after} if before.get(file) != after.get(file)}
    # The trainer's last state was older than the checkpoint: it would not be gone on from.
    older = {f for f in changed if f.startswith(("checkpoints/last-state/", "checkpoints/run-st"))}
    assert changed - older <= MAY_GROW
