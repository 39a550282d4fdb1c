"""A small run: the shipped mesh and config, cut down by overrides to a handful of steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MESH = ROOT / "meshes" / "longhealth.yaml"

SMALL = {
    "data.patients": 2,
    "rollout.prompts": 6,
    "rollout.max_tokens": 24,
    # The student's own text from the first step on: the shipped job begins with the teacher's and
    # goes on with what the document verifies.
    "cartridge.init": "first_tokens",
    "rollout.verify": None,
    "train.warm_start": None,
    "train.minibatches": 1,
    "train.steps": 6,
    "train.warmup_steps": 2,
    "train.checkpoint_every": 2,
    "evaluate.questions": 8,
    "evaluate.probe_every": 3,
    "evaluate.probe_questions": 4,
    "evaluate.max_tokens": 20,
    "roles.doc_teacher.threads": 1,
    "roles.trainer.threads": 1,
    "spares": 0,  # a process that imports for seconds, and that most tests would not use
}

END_SECONDS = 120.0

STALE: dict[str, Any] = {"train.staleness": 1, "evaluate.arms": ["on_policy"]}


def command(run_dir: Path, *extra: str, **sets: Any) -> list[str]:
    """The console script's own function, with the small overrides and some more."""
    code = "import sys; from cartridge_forge.forge_run.cli import forge_run; sys.exit(forge_run())"
    words = [sys.executable, "-c", code, str(MESH), "--run-dir", str(run_dir), *extra]
    for key, value in {**SMALL, **{k.replace("__", "."): v for k, v in sets.items()}}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return words


def run_to_end(words: list[str], timeout: float = 500.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=timeout
    )


def latest(run_dir: Path) -> Path:
    return (run_dir / "longhealth" / "latest").resolve()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def same_outcome(path: Path, reference: Path) -> None:
    """Files that the seed decides are equal to the byte; of the results, all but the times."""
    for name in ("metrics.jsonl", "rollouts.jsonl", "answers.jsonl"):
        assert (path / name).read_bytes() == (reference / name).read_bytes(), name
    results = []
    for p in (path, reference):
        found = json.loads((p / "results.json").read_text())
        for timing in ("phases", "orchestration_share", "cpu", "wall_seconds", "step_seconds"):
            found.pop(timing, None)  # `cpu` is of local runs alone
        results.append(found)
    assert results[0] == results[1]


@dataclass(frozen=True)
class Finished:
    """A run that ended: what it printed, and its directory."""

    process: subprocess.CompletedProcess[str]
    path: Path


@dataclass
class Running:
    """A run in progress. `mark` stands in the environment of its every process."""

    process: subprocess.Popen[str]
    root: Path
    mark: str

    def wait_for(self, arm: str, step: int, timeout: float = 300.0) -> Path:
        """The run directory, once `step` of `arm` is recorded."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "the run ended before the step that was waited for"
            metrics = latest(self.root) / "metrics.jsonl"
            # The last line may still be half written.
            whole = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
            done = [json.loads(line) for line in whole if line.endswith("\n")]
            if any(r["arm"] == arm and r["step"] >= step for r in done):
                return latest(self.root)
            time.sleep(0.02)
        raise AssertionError(f"step {step} of {arm} did not come within {timeout} s")

    def alive(self) -> list[int]:
        """Process ids of this run that still run."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (process / "environ").read_bytes():
                    found.append(int(process.name))
            except OSError:  # gone meanwhile, or another user's
                continue
        return found

    def wait_until_gone(self, seconds: float) -> None:
        """Fail when a process of the run is alive after so many seconds."""
        deadline = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"processes left: {left}"

    def stand_still(self, seconds: float) -> None:
        """Stop every process for so long, as a paused container or a closed lid does."""
        pids = self.alive()
        for number, pause in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0.0)):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(pause)

    def stop(self) -> None:
        """Tell it to end; fail when it says otherwise by its exit code or leaves a process."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=180)
        assert self.process.returncode == 128 + signal.SIGTERM
        self.wait_until_gone(60)

    def kill(self) -> None:
        """Kill whatever is left of it."""
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=30)


@contextmanager
def running(words: list[str], root: Path, folder: Path = ROOT) -> Iterator[Running]:
    """The run as a process of its own, started in `folder`; whatever is left of it at the end is
    killed."""
    mark = f"FORGE_TEST_RUN={uuid.uuid4().hex}"
    key, value = mark.split("=")
    process = subprocess.Popen(
        words, cwd=folder, env={**os.environ, key: value}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    run = Running(process, root, mark)
    try:
        yield run
    finally:
        run.kill()


def end_of(run: Running) -> str:
    """What the run said, once it has ended by itself with exit code 1 and left no process."""
    said, _ = run.process.communicate(timeout=END_SECONDS)
    assert run.process.returncode == 1, said
    assert "Traceback" not in said
    run.wait_until_gone(END_SECONDS)
    return " ".join(said.split())


def whole_and_resumed(root: Path, reference: Path) -> None:
    process = run_to_end(command(root, "--resume"))
    assert process.returncode == 0, process.stdout + process.stderr
    same_outcome(latest(root), reference)
