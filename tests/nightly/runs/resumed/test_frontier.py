"""`forge frontier` over a run, once more."""

from __future__ import annotations

from pathlib import Path

from finished_runs import compared
from small_run import Finished


def test_the_same_seed_gives_the_same_answers(finished: Finished, tmp_path: Path) -> None:
    """Whatever they were batched with."""
    _, _, told = compared(finished, tmp_path, times=2)
    for again in told:
        for row in again["arms"]:
            del row["latency"], row["seconds"]
    assert told[0] == told[1]
