"""The report's section on test-time compute: accuracy against tokens, from frontier.json."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from forge_run.frontier_table import HEADS, cells
from forge_run.page import HUES, PAINT, figure, section, table
from services.frontier import ArmRow
from services.rundir import FRONTIER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = (
    "Means a question, on the same held-out questions with the same draws; what is over the first "
    "arm is counted question by question. Seconds are those of all questions side by side."
)


def frontier(run: Path) -> str:
    """The table and the plot; "" for a run whose strategies nobody compared."""
    file = run / FRONTIER
    if not file.is_file():
        return ""
    told = json.loads(file.read_text(encoding="utf-8"))
    rows = [ArmRow(**arm) for arm in told["arms"]]
    name = f"{rows[0].n} questions over version {told['version']}"
    plot = figure(
        "Accuracy against tokens",
        f"{name}; bars are 95% intervals, lines join the budgets of one strategy.",
        partial(_draw, rows=rows),
        height=4.2,
    )
    body = f'<p class="soft">{NOTE}</p>\n{table(name, HEADS, map(cells, rows))}\n{plot}'
    return section("Test-time compute", body)


def best(rows: list[ArmRow]) -> list[ArmRow]:
    """The frontier: arms that nothing beats with as many tokens or fewer, by tokens."""
    found: list[ArmRow] = []
    for row in sorted(rows, key=lambda r: (r.tokens, -r.accuracy)):
        if not found or row.accuracy > found[-1].accuracy:
            found.append(row)
    return found


def _draw(figure: Figure, rows: list[ArmRow]) -> None:
    axes = figure.add_subplot(xlabel="tokens sampled a question", xscale="log")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    edge = best(rows)
    axes.step(
        [r.tokens for r in edge], [r.accuracy for r in edge], where="post",
        color=PAINT["soft"], linestyle=":", linewidth=1, label="frontier",
    )  # fmt: skip
    for i, name in enumerate(dict.fromkeys(row.strategy for row in rows)):
        own = sorted((r for r in rows if r.strategy == name), key=lambda r: r.tokens)
        colour, marker = PAINT[HUES[i % len(HUES)]], "osD^v<>P"[i % 8]
        x, y = [r.tokens for r in own], [r.accuracy for r in own]
        bars = [[r.accuracy - r.ci95[0] for r in own], [r.ci95[1] - r.accuracy for r in own]]
        axes.errorbar(
            x, y, yerr=bars, label=name, color=colour, marker=marker, markersize=4,
            linewidth=0.9, elinewidth=0.5,
        )  # fmt: skip
    axes.legend(fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
