"""Runs that earlier commits made and did not finish, as archives of tests/data/histories.

    git worktree add --detach /tmp/tree COMMIT
    PYTHONPATH=.:tests/setups python tests/setups/histories.py /tmp/tree

records one by the code of that tree, in a minute or two. The run is the main job, cut down to
four steps over one patient; it is killed after the third, of which the checkpoint is the second's.
A finished issue adds one of its last commit: `.` as the tree.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from small_run import ROOT, running

FOLDER = ROOT / "tests/data/histories"
STEPS, KILLED_AFTER = 4, 3
SETS: dict[str, Any] = {
    "data.patients": 1,
    "cartridge.tokens": 10,
    "rollout.prompts": 4,
    "rollout.max_tokens": 16,
    "train.steps": STEPS,
    "train.warmup_steps": 1,
    "train.checkpoint_every": 2,
    "evaluate.arms": ["on_policy"],
    "evaluate.questions": 2,
    "evaluate.probe_every": 2,
    "evaluate.probe_questions": 2,
    "evaluate.max_tokens": 8,
    "roles.generator.replicas": 1,
    "roles.doc_teacher.threads": 1,
    "roles.trainer.threads": 1,
    "spawn_timeout_s": 1200,
    "call_timeout_s": 1200,
}
TREE = "<tree>"  # stands in an archive's texts for the folder of the code
OF_THE_PROCESS = {
    ".lease", ".reserve", ".document-kv", "endpoints.json", "control.token", "report.html",
}  # fmt: skip
CODE = "import sys; from {package}.cli import forge_run; sys.exit(forge_run())"


def command(tree: Path, root: Path, *extra: str) -> list[str]:
    """The command of the run by the code of `tree`."""
    moved = (tree / "cartridge_forge/forge_run").exists()  # on 2026-11-29
    code = CODE.format(package="cartridge_forge.forge_run" if moved else "forge_run")
    words = [sys.executable, "-c", code, str(tree / "meshes/longhealth.yaml")]
    words += ["--run-dir", str(root), *extra]
    for key, value in SETS.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return words


def pack(path: Path, tree: Path, archive: Path) -> None:
    """Write a run's directory as an archive, without what a process keeps there for itself."""
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path)
            if not file.is_file() or OF_THE_PROCESS & set(name.parts):
                continue
            content = file.read_bytes().replace(str(tree).encode(), TREE.encode())
            entry = tarfile.TarInfo(f"{path.name}/{name}")
            entry.size, entry.mode = len(content), 0o600
            packed.addfile(entry, io.BytesIO(content))


def unpack(archive: Path, root: Path) -> Path:
    """Lay an archive's run below `root`, as if the code of this tree had made it there; returns its
    directory."""
    mesh = root / "longhealth"
    mesh.mkdir(parents=True)
    with tarfile.open(archive) as packed:
        packed.extractall(mesh, filter="data")
    (path,) = mesh.iterdir()
    for file in path.rglob("*"):
        if file.is_file() and TREE.encode() in (content := file.read_bytes()):
            file.write_bytes(content.replace(TREE.encode(), str(ROOT).encode()))
    (mesh / "latest").symlink_to(path.name)
    return path


def record(tree: Path) -> None:
    """Make a run by the code of a tree, kill it after KILLED_AFTER steps, and pack it."""
    words = ["git", "-C", str(tree), "log", "-1", "--format=%cs-%h", "--abbrev=8"]
    name = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    os.environ["PYTHONPATH"] = str(tree)
    with (
        tempfile.TemporaryDirectory() as folder,
        running(command(tree, Path(folder)), Path(folder), tree) as run,
    ):
        path = run.wait_for("on_policy", KILLED_AFTER, timeout=1200)
        run.kill()
        FOLDER.mkdir(parents=True, exist_ok=True)
        pack(path, tree, FOLDER / f"{name}.tar.xz")


if __name__ == "__main__":
    record(Path(sys.argv[1]).resolve())
