"""`forge frontier` over the cartridges of a run, from the command line to the report."""

from __future__ import annotations

import sys
from pathlib import Path

from finished_runs import FORGE, compared
from small_run import Finished, run_to_end


def test_strategies_are_compared_and_the_report_tells(finished: Finished, tmp_path: Path) -> None:
    run, said, [told] = compared(finished, tmp_path, times=1)
    assert "self_consistency samples=4" in said
    assert "self_consistency samples=4" in (run / "report.html").read_text()
    rows = told["arms"]
    assert [row["n"] for row in rows] == [6] * 5
    assert [row["calls"] for row in rows[:2]] == [1, 1]
    assert rows[0]["tokens"] < rows[1]["tokens"] <= 4 * 20


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    process = run_to_end([sys.executable, "-c", FORGE, "frontier", str(tmp_path)])
    assert process.returncode != 0
    assert "is no run directory" in process.stderr
