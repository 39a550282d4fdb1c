"""The examples run from their own mesh files, with models that are hardly trained and two steps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from environments.verifiers.worker_process import PYTHON
from protocols.files import iter_rows
from services.run_directory import RunDirectory
from teachers.fake_provider.server import LoopbackServer

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SHORT = (
    "train.steps=2", "train.warmup_steps=1", "episodes.tasks=2", "episodes.group=4",
    "evaluate.arms=[on_policy]", "evaluate.questions=4", "evaluate.sampled=false",
)  # fmt: skip

pytestmark = [
    pytest.mark.timeout(600),  # a busy machine takes long
    pytest.mark.filterwarnings("ignore:Accessing `Tool.inputSchema`"),
]


@contextmanager
def calculator() -> Iterator[Mapping[str, str]]:
    from examples.calculator.server import calculator_app

    with LoopbackServer(calculator_app(), "calculator", ws="websockets-sansio") as server:
        yield {"episodes.environment.url": server.url}


def trained(name: str, model: Path, steps: int) -> None:
    command = [sys.executable, "-m", f"examples.{name}.make_model", "--steps", str(steps)]
    subprocess.run([*command, "--out", str(model)], check=True, timeout=300, capture_output=True)


def ran(name: str, folder: Path, sets: Mapping[str, str]) -> RunDirectory:
    trained(name, folder / "model", steps=20)
    given = [f"--set={key}={value}" for key, value in sets.items()]
    command = [
        sys.executable, "-c", "import sys; from forge_run.cli import forge_run; "
        "sys.exit(forge_run())", str(EXAMPLES / name / "mesh.yaml"), "--run-dir", str(folder),
        f"--set=model.path={folder / 'model'}", *(f"--set={s}" for s in SHORT), *given,
    ]  # fmt: skip
    done = subprocess.run(command, timeout=500, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return RunDirectory((folder / name / "latest").resolve())


def counts(run: RunDirectory) -> list[dict[str, Any]]:
    return [row["episodes"] for row in iter_rows(run.metrics)]


def test_code_fixing_runs(tmp_path: Path) -> None:
    run = ran("code_fixing", tmp_path, {})
    assert [row["count"] for row in counts(run)] == [8, 8]
    assert [row["errored"] for row in counts(run)] == [0, 0]
    episodes = list(iter_rows(run.episodes))
    assert {e["task"]["environment"] for e in episodes} == {"code_fixing"}
    assert all(e["reward"] in (0.0, 1.0) for e in episodes)
    said = [t["observation"]["messages"][0]["content"] for e in episodes for t in e["turns"]]
    assert all("f(" in text or text.endswith(".") for text in said)
    assert json.loads(run.results.read_bytes())["status"] == "finished"


def test_the_calculator_runs_beside_an_environment_that_is_gone(tmp_path: Path) -> None:
    """Two environments: the tools of a live server, and a server that nobody started. The dead
    one's episodes are counted as errors, and the run goes on."""
    with calculator() as live:
        url = live["episodes.environment.url"]
        shared = f"kind: openenv, action: tool, document: {EXAMPLES / 'calculator' / 'rules.txt'}"
        run = ran("calculator", tmp_path, {
            "episodes.environment": "{}",
            "episodes.environments": f"[{{{shared}, name: live, url: '{url}'}}, "
            f"{{{shared}, name: gone, url: 'http://127.0.0.1:9', timeout_s: 5}}]",
            "data.patients": "2",
        })  # fmt: skip
    for row in counts(run):
        assert row["environment/live/count"] == row["environment/gone/count"] == 4
        assert row["environment/gone/errored"] == 4
        assert "environment/gone/reward" not in row
    episodes = list(iter_rows(run.episodes))
    errors = {e["error_kind"] for e in episodes if e["task"]["environment"] == "gone"}
    assert errors == {"environment_died"}
    assert {e["task"]["document"] for e in episodes} == {"live", "gone"}


@pytest.mark.skipif(not PYTHON.exists(), reason="make install-verifiers")
def test_sokoban_runs(tmp_path: Path) -> None:
    run = ran("sokoban", tmp_path, {"episodes.max_turns": "3"})
    assert [row["count"] for row in counts(run)] == [8, 8]
    episodes = list(iter_rows(run.episodes))
    assert all(e["error_kind"] in ("", "no_verdict", "context_full") for e in episodes)
    assert max(len(e["turns"]) for e in episodes) == 3
