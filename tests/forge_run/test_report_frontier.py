"""The frontier on the report: the table, the plot, and which arms nothing beats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from report_house import HOSTILE, Page

from forge_run.report_frontier import best, frontier
from services.frontier import ArmRow

ONE = ArmRow("one", "chain_of_thought", 0.5, (0.4, 0.6), 100, 3, 12.0, 30.0, 1.0, 0.2, 4.0)


def arm(name: str, accuracy: float, tokens: float) -> ArmRow:
    return replace(
        ONE, name=name, accuracy=accuracy, tokens=tokens, gain=accuracy - 0.5,
        gain_ci95=(accuracy - 0.6, accuracy - 0.4),
        ci95=(accuracy - 0.1, accuracy + 0.1),
    )  # fmt: skip


def test_the_frontier_is_what_nothing_beats_for_less() -> None:
    rows = [ONE, arm("a", 0.6, 40), arm("b", 0.6, 48), arm("c", 0.55, 20), arm("d", 0.4, 99)]
    assert [r.name for r in best(rows)] == ["one", "c", "a"]


def test_a_run_without_it_says_nothing(tmp_path: Path) -> None:
    assert frontier(tmp_path) == ""


def test_every_arm_is_told_and_escaped(tmp_path: Path) -> None:
    rows = [ONE, arm("rsa N=4", 0.62, 200), arm(HOSTILE, 0.7, 400)]
    (tmp_path / "frontier.json").write_text(
        json.dumps({"version": 16, "arms": [row.as_dict() for row in rows]})
    )
    html = frontier(tmp_path)
    page = Page(html)
    assert "100 questions over version 16" in page.text
    assert HOSTILE in page.text
    assert "script" not in [tag for tag, _ in page.tags]
    for cell in ("50.0%", "+12.0", "200", "30", "4.0"):
        assert cell in page.text
    assert html == frontier(tmp_path)
