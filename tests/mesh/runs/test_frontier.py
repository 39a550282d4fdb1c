"""`forge frontier` over the cartridges of a run, from the command line to the report."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from small_run import Finished, run_to_end
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
CODE = "import sys; from forge_run.cli import forge; sys.exit(forge())"


def test_strategies_are_compared_and_the_report_tells(finished: Finished, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.path, run)  # the run's own tests count its files
    (tmp_path / "arms.yaml").write_text(ARMS)
    reward_model(tmp_path / "prm", reads=2048)
    words = [
        sys.executable,
        "-c",
        CODE,
        "frontier",
        str(run),
        "--arms",
        str(tmp_path / "arms.yaml"),
    ]
    told = []
    for _ in range(2):
        process = run_to_end(words)
        assert process.returncode == 0, process.stdout + process.stderr
        told.append(json.loads((run / "frontier.json").read_text()))
    assert "self_consistency samples=4" in process.stdout
    assert "self_consistency samples=4" in (run / "report.html").read_text()
    rows = told[0]["arms"]
    assert [row["n"] for row in rows] == [6] * 5
    assert [row["calls"] for row in rows[:2]] == [1, 1]
    assert rows[0]["tokens"] < rows[1]["tokens"] <= 4 * 20
    # The same seed gives the same answers, whatever they were batched with.
    for again in told:
        for row in again["arms"]:
            del row["latency"], row["seconds"]
    assert told[0] == told[1]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    process = run_to_end([sys.executable, "-c", CODE, "frontier", str(tmp_path)])
    assert process.returncode != 0
    assert "is no run directory" in process.stderr
