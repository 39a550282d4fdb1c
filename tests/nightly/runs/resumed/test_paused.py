"""A run whose every process stood still, as in a paused container, loses no replica and no byte; a
role that is killed or stopped alone is found as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_run import STALE, Finished, command, running, same_outcome

ARM = {"evaluate__arms": ["on_policy"]}


def named(path: Path, event: str) -> list[dict[str, Any]]:
    rows = map(json.loads, (path / "events.jsonl").read_text().splitlines())
    return [row for row in rows if row["event"] == event]


@pytest.mark.parametrize("seconds", [6, 30, 60])
def test_a_pause_of_all_processes_changes_nothing(
    seconds: int, stale: Finished, tmp_path: Path
) -> None:
    with running(command(tmp_path, **STALE), tmp_path) as run:
        path = run.wait_for("on_policy", 2)
        run.stand_still(seconds)
        said, _ = run.process.communicate(timeout=300)
        assert run.process.returncode == 0, said
    assert named(path, "replica_lost") == []
    same_outcome(path, stale.path)
