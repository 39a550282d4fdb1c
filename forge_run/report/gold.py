"""Report how likely each arm holds the right answers, and show the arms' answers side by side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from forge_run.console import GOLD_HEADS, gold_rows
from forge_run.formatting import TableSection
from forge_run.report.template import Block, Row, shortened
from protocols.records.gold import side_by_side

MEANING = (
    "The mean negative log-probability of the right answer's tokens, in nats: less is better. The "
    "gap closed is (none - arm) / (none - document), paired by question, with the middle 95% of "
    "resamples of the documents and their questions."
)


def gold(results: Row | None, rows: Iterable[Any]) -> list[Block]:
    """Return the table of the arms and the first questions with every arm's answer; nothing for
    questions without a right answer."""
    if not results:
        return []
    blocks: list[Block] = [
        ("soft", MEANING),
        ("table", TableSection("Right answers", GOLD_HEADS, gold_rows(results))),
    ]
    arms, shown = side_by_side(rows)
    talks: list[Block] = [
        (
            "talk",
            (asked, [("right", right), *((arm, shortened(said.get(arm, ""))) for arm in arms)]),
        )
        for asked, right, said in shown
    ]
    return [*blocks, ("folded", (f"The arms' answers to {len(shown)} questions", talks))]
