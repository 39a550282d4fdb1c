"""List the source files that one strict training step runs, over all of its processes.

    .venv/bin/python tests/nightly/step_files.py [LIMIT]

Runs four steps of meshes/longhealth.yaml, plain on policy, and prints the files whose functions are
called between the begin and the end of the third, which imports nothing and fills no cache for the
first time.
Files of supervision, telemetry and the control plane are listed apart (`BESIDE`). Exits 1 where
more than LIMIT files carry the step.

Every function of the tree gets a first statement that notes its call. A profiler would not do: it
is set for each thread, and Monarch starts threads of its own.
"""

from __future__ import annotations

import ast
import builtins
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "FORGE_STEP_FILES"  # environment variable: where each process notes its calls
NOTE = "__note_call__"
STEP = 2
BEGIN, END = "training/loop.py OnPolicyLoop.step", "training/training_run.py TrainingRun._record"
# What keeps processes alive, and what tells of the run: no number of a step depends on it.
BESIDE = (
    "plugins/watch/", "services/run_directory.py",
    "plugins/host/run_lease.py", "services/run_log.py", "services/proc_info.py",
    "services/pool/sizes.py", "services/pool/health.py",
    "services/pool/lifecycle.py", "services/pool/process.py",
    "services/pool/process_manager.py", "services/pool/service.py", "services/pool/hosts.py",
    "plugins/cluster/hosts/", "forge_run/forkserver/", "actors/heartbeat.py",
    "plugins/watch/token_scores.py", "protocols/files.py", "protocols/records/",
    "plugins/watch/console.py",
    "protocols/wire/", "training/controller.py", "training/training_run.py",
    "forge_run/",
)  # fmt: skip


def install() -> None:
    """Make this process note the calls of every module of the tree that it imports from now on."""
    folder = Path(os.environ[FOLDER])
    begun: dict[tuple[str, int], None] = {}

    def note(name: str) -> None:
        now = time.time()
        key = (name, int(now * 100))
        if key not in begun or name in (BEGIN, END):
            begun[key] = None
            with open(folder / f"{os.getpid()}", "a") as file:
                file.write(f"{now:.6f} {name}\n")

    setattr(builtins, NOTE, note)
    sys.meta_path.insert(0, NotingFinder())


class NotingFinder(MetaPathFinder):
    """Find the modules of the tree, for a loader that adds the notes."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or not isinstance(spec.loader, SourceFileLoader) or not spec.origin:
            return None
        origin = Path(spec.origin).resolve()
        if not origin.is_relative_to(ROOT) or ".venv" in origin.relative_to(ROOT).parts:
            return None
        spec.loader = NotingLoader(name, spec.origin)
        return spec


class NotingLoader(SourceFileLoader):
    """Compile a module with a note at the begin of every function, past any cached bytecode."""

    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.path)
        tree = ast.parse(path.read_bytes(), str(path))
        add_notes(tree.body, str(path.resolve().relative_to(ROOT)) + " ", "")
        return compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)


def add_notes(body: Iterable[ast.stmt], file: str, outer: str) -> None:
    """Add a note of `file` and the function's name after the docstring of each function."""
    for node in body:
        name = outer + getattr(node, "name", "")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            call = ast.parse(f"{NOTE}({file + name!r})").body[0]
            add_notes(node.body, file, f"{name}.")
            node.body.insert(ast.get_docstring(node, clean=False) is not None, call)
        elif isinstance(node, ast.ClassDef):
            add_notes(node.body, file, f"{name}.")


def run(folder: Path) -> list[tuple[float, str]]:
    """Run the steps with every process noting into `folder`; return (time, call), by time."""
    notes = folder / "notes"
    notes.mkdir()
    (folder / "sitecustomize.py").write_text(
        f"import runpy\nrunpy.run_path({str(Path(__file__).resolve())!r})['install']()\n"
    )
    path = os.pathsep.join([str(folder), str(ROOT)])
    command = (
        "import sys; from cartridge_forge.forge_run.cli import forge_run; sys.exit(forge_run())"
    )
    arguments = [
        "meshes/longhealth.yaml", "--set", "train.steps=4", "--set", "train.warmup_steps=1",
        "--set", "train.warm_start=null", "--set", "rollout.verify=null",
        "--set", "train.minibatches=1",
        "--set", "evaluate.arms=[on_policy]", "--set", "evaluate.questions=8",
        "--run-dir", str(folder / "run"),
    ]  # fmt: skip
    subprocess.run(
        [sys.executable, "-c", command, *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path, FOLDER: str(notes)},
        check=True, timeout=900, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    lines = [line for file in notes.iterdir() for line in file.read_text().splitlines()]
    return sorted((float(at), call) for at, _, call in (line.partition(" ") for line in lines))


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        calls = run(Path(folder))
    begin = [at for at, call in calls if call == BEGIN][STEP]
    end = next(at for at, call in calls if call == END and at > begin)
    found: dict[str, set[str]] = {}
    for at, call in calls:
        if begin <= at <= end:
            file, _, function = call.partition(" ")
            found.setdefault(file, set()).add(function)
    beside = {file for file in found if file.startswith(BESIDE)}
    for title, files in (("carry the step", set(found) - beside), ("beside it", beside)):
        functions = sum(len(found[file]) for file in files)
        lines = sum((ROOT / file).read_text().count("\n") for file in files)
        print(f"{len(files)} files {title}: {functions} functions, files of {lines} lines")
        for file in sorted(files):
            print(f"  {file:40} {' '.join(sorted(found[file]))}")
    limit = int(sys.argv[1]) if len(sys.argv) > 1 else len(found)
    return len(found) - len(beside) > limit


if __name__ == "__main__":
    sys.exit(main())
