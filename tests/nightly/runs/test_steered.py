"""`forge`, the console script's own function, on a real run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos import REPLACED
from small_run import ROOT, command, rows, running

FORGE = "import sys; from forge_run.cli import forge; sys.exit(forge())"
SECONDS = 180.0  # of patience


def words(root: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-c", FORGE, *arguments, "--run-dir", str(root)]


def forge(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        words(root, *arguments), cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def status(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(forge(root, "status", "--json"))
    return found


def generators(root: Path) -> list[str]:
    """Their states, as `forge status` shows them."""
    (pool,) = [p for p in status(root)["pools"] if p["role"] == "generator"]
    return [r["state"] for r in pool["replicas"]]


def wait_until(condition: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < SECONDS
        time.sleep(0.1)


def test_a_run_is_steered_from_outside(tmp_path: Path) -> None:
    sets = {"train__steps": 5000, "evaluate__arms": ["on_policy"], "evaluate__probe_every": 0}
    with running(command(tmp_path, **sets), tmp_path) as run:
        path = run.wait_for("on_policy", 2)
        # The chaos suite strikes whatever there is.
        assert {p["role"] for p in status(tmp_path)["pools"]} == set(REPLACED)
        events = subprocess.Popen(
            words(tmp_path, "events", "--follow"), cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert generators(tmp_path) == ["healthy"] * 2

        assert forge(tmp_path, "scale", "generator", "4").startswith("generator: 4 wanted")
        assert len(generators(tmp_path)) == 4, "it shows at once"
        wait_until(lambda: generators(tmp_path) == ["healthy"] * 4)
        step = status(tmp_path)["step"]
        wait_until(lambda: status(tmp_path)["step"] > step)
        forge(tmp_path, "scale", "generator", "1")
        wait_until(lambda: generators(tmp_path) == ["healthy"])
        step = status(tmp_path)["step"]
        wait_until(lambda: status(tmp_path)["step"] > step)

        forge(tmp_path, "pause")
        wait_until(lambda: status(tmp_path)["paused"])
        held = status(tmp_path)["step"]
        time.sleep(1.5)  # several steps
        name = forge(tmp_path, "checkpoint").split()[-1]
        assert (path / "checkpoints" / name / "manifest.json").is_file()
        assert name == f"version-{held:06d}"
        assert status(tmp_path)["step"] == held
        assert len(rows(path / "metrics.jsonl")) == held
        forge(tmp_path, "resume")
        wait_until(lambda: status(tmp_path)["step"] > held)

        assert forge(tmp_path, "stop").startswith("stopping after the step in progress")
        said, _ = run.process.communicate(timeout=SECONDS)
        run.wait_until_gone(SECONDS)
    assert run.process.returncode == 0, said
    told, _ = events.communicate(timeout=SECONDS)
    assert events.returncode == 0
    seen = [json.loads(line) for line in told.splitlines()]
    assert [e["replicas"] for e in seen if e["event"] == "scaled"] == [4, 1]
    names = [e["event"] for e in seen]
    for name in ("paused", "resumed", "stopping", "checkpoint", "finished"):
        assert name in names
    assert json.loads((path / "results.json").read_text())["status"] == "stopped"
