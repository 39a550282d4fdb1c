"""Report test-time compute: accuracy against tokens, from frontier.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cartridge_forge.plugins.statistics.formatting import TableSection
from cartridge_forge.plugins.watch.console import interval, percent
from cartridge_forge.plugins.watch.report.plots import (
    MARKERS,
    PAINT,
    Plot,
    error_bars,
    hue,
    legend,
    share_axes,
)
from cartridge_forge.plugins.watch.report.template import Block
from cartridge_forge.services.run_directory import FRONTIER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cartridge_forge.plugins.evaluate.strategies import ArmRow

HEADS = (
    "strategy", "accuracy", "95%", "over the first", "95%", "tokens", "read", "calls", "seconds"
)  # fmt: skip
NOTE = (
    "Means a question, on the same held-out questions with the same draws; what is over the first "
    "arm is counted question by question. Seconds are those of all questions side by side."
)


def frontier(run: Path) -> list[Block]:
    """Return the table and the plot; nothing for a run without frontier.json."""
    file = run / FRONTIER
    if not file.is_file():
        return []
    from cartridge_forge.plugins.evaluate.strategies import ArmRow  # which imports torch

    content = json.loads(file.read_text(encoding="utf-8"))
    rows = [ArmRow(**arm) for arm in content["arms"]]
    name = f"{rows[0].n} questions over version {content['version']}"
    note = f"{name}; bars are 95% intervals, lines join the budgets of one strategy."
    drawn = Plot("Accuracy against tokens", note, partial(_draw, rows=rows), height=4.2)
    return [("soft", NOTE), ("table", arms_table(name, rows)), ("plots", [drawn])]


def arms_table(title: str, rows: Sequence[ArmRow]) -> TableSection:
    """Return the table of the arms; questions of several parts have their F1 too."""
    heads = HEADS if rows[0].f1 is None else (*HEADS, "F1")
    return TableSection(title, heads, tuple(map(cells, rows)))


def cells(row: ArmRow) -> tuple[str, ...]:
    """Return a row of the table, as texts."""
    return (
        row.name, percent(row.accuracy), interval(row.ci95),
        "-" if row.gain is None else f"{100 * row.gain:+.1f}",
        "-" if row.gain_ci95 is None else interval(row.gain_ci95),
        f"{row.tokens:.0f}", f"{row.prompt_tokens:.0f}", f"{row.calls:.1f}", f"{row.seconds:.1f}",
        *(() if row.f1 is None else (f"{row.f1:.2f}",)),
    )  # fmt: skip


def best(rows: list[ArmRow]) -> list[ArmRow]:
    """Return the frontier by tokens: arms that no other beats with as many tokens or fewer."""
    front: list[ArmRow] = []
    for row in sorted(rows, key=lambda r: (r.tokens, -r.accuracy)):
        if not front or row.accuracy > front[-1].accuracy:
            front.append(row)
    return front


def _draw(figure: Figure, rows: list[ArmRow]) -> None:
    axes = share_axes(figure, xlabel="tokens sampled a question", xscale="log")
    edge = best(rows)
    axes.step(
        [r.tokens for r in edge], [r.accuracy for r in edge], where="post",
        color=PAINT["soft"], linestyle=":", linewidth=1, label="frontier",
    )  # fmt: skip
    for i, name in enumerate(dict.fromkeys(row.strategy for row in rows)):
        chosen = sorted((r for r in rows if r.strategy == name), key=lambda r: r.tokens)
        x, y = [r.tokens for r in chosen], [r.accuracy for r in chosen]
        error_bars(
            axes, x, y, [r.ci95 for r in chosen], label=name, color=hue(i),
            marker=MARKERS[i % len(MARKERS)], markersize=4, linewidth=0.9, elinewidth=0.5,
        )  # fmt: skip
    legend(axes, ncols=3)
