"""Runs whose cartridges train beside others: both arms, and one that is killed and goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from small_run import command, latest, rows, run_to_end, running, same_outcome

COMPOSED: dict[str, Any] = {
    "data.patients": 4,
    "train.compose": {"distractors": 2, "share": 0.5},
    "evaluate.arms": ["offline", "on_policy"],
}


def test_half_of_each_step_is_composed_and_a_killed_run_ends_equal(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = run_to_end(command(whole, **COMPOSED))
    assert done.returncode == 0, done.stdout + done.stderr
    reference = latest(whole)
    by_step: dict[tuple[str, int], list[list[str]]] = {}
    for row in rows(reference / "rollouts.jsonl"):
        composed = row.get("composed", [])
        by_step.setdefault((row["arm"], row["step"]), []).append(composed)
        assert not composed or row["cartridge"] in composed
    assert by_step.keys() == {(arm, s) for arm in ("offline", "on_policy") for s in range(1, 7)}
    for of_step in by_step.values():
        assert sorted(map(len, of_step)) == [0, 0, 0, 3, 3, 3]

    with running(command(killed, **COMPOSED), killed) as run:
        run.wait_for("on_policy", 3)
        for pid in run.alive():
            os.kill(pid, signal.SIGKILL)
    resumed = run_to_end(command(killed, "--resume", **COMPOSED))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    same_outcome(latest(killed), reference)
