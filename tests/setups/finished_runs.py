"""Uninterrupted small runs, shared by the tests that look at them or compare with them."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from other_user import run_closed
from small_run import STALE, Finished, command, latest, run_to_end
from strategy_setup import reward_model

ARMS = """\
questions: 6
max_tokens: 20
process_reward: {model: {path: prm, separator: "\\n"}}
arms:
  - {strategy: chain_of_thought}
  - {strategy: self_consistency, options: {samples: 4}}
  - {strategy: best_of_n, options: {candidates: 2}}
  - {strategy: deepconf, options: {traces: 4, window: 4, keep_fraction: 0.5}}
  - {strategy: best_of_n, options: {candidates: 2, scorer: process_reward}}
"""
FORGE = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    root = tmp_path_factory.mktemp("finished")
    process = run_to_end(command(root))
    assert process.returncode == 0, process.stdout + process.stderr
    return Finished(process, latest(root))


@pytest.fixture(scope="session")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One of the on-policy arm alone, whose rollouts run a step ahead."""
    root = tmp_path_factory.mktemp("stale")
    process = run_to_end(command(root, **STALE))
    assert process.returncode == 0, process.stdout + process.stderr
    return Finished(process, latest(root))


def compared(
    finished: Finished, folder: Path, times: int
) -> tuple[Path, str, list[dict[str, Any]]]:
    """The run that was asked so many times, what the last time printed, and what each found."""
    run = folder / "run"
    shutil.copytree(finished.path, run)  # the run's own tests count its files
    (folder / "arms.yaml").write_text(ARMS)
    reward_model(folder / "prm", reads=2048)
    words = [sys.executable, "-c", FORGE, "frontier", str(run), "--arms", str(folder / "arms.yaml")]
    told = []
    for _ in range(times):
        process = run_closed(words)
        assert process.returncode == 0, process.stdout + process.stderr
        told.append(json.loads((run / "frontier.json").read_text()))
    return run, process.stdout, told
