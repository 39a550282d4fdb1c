"""Report recursive self-aggregation: the accuracy of each population.

From results.json come the arms' populations and the gain of training; from metrics.jsonl the
accuracy of each population of the training problems by step. A run without populations has no such
section.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from cartridge_forge.plugins.statistics.formatting import TableSection
from cartridge_forge.plugins.watch.console import percent
from cartridge_forge.plugins.watch.report.plots import Plot, curve, hue, share_axes
from cartridge_forge.plugins.watch.report.template import Block, Row
from cartridge_forge.protocols.records.run_files import ARMS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCURACY = "rsa/accuracy_"  # key prefix in a row's episodes, before the population's number


def aggregation(metrics: Sequence[Row], results: Row) -> list[Block]:
    """Return accuracy by population and the gain of training; nothing without populations."""
    arms = results.get("arms") or {}
    populations_of = {
        arm: arms[arm]["populations"] for arm in ARMS if (arms.get(arm) or {}).get("populations")
    }
    rows = [row for row in metrics if f"{ACCURACY}0" in (row.get("episodes") or {})]
    blocks: list[Block] = []
    if rows:
        title, note = "Accuracy of each population", "Problems that are trained on, by step."
        blocks.append(("plots", [Plot(title, note, partial(_draw, rows=rows))]))
    if populations_of:
        steps = max(len(populations["accuracy"]) for populations in populations_of.values())
        heads = ("arm", *(f"population {t}" for t in range(steps)), "majority", "pass at n")
        lines = tuple(
            (arm, *map(percent, [*p["accuracy"], p["majority_vote"], p["pass_at_n"]]))
            for arm, p in populations_of.items()
        )
        name = "Accuracy of each population on held-out problems"
        blocks += [("soft", f"{name}."), ("table", TableSection(name, heads, lines))]
    if gain := results.get("aggregation"):
        blocks.append(("text", _gain_text(gain)))
    return blocks


def _gain_text(gain: Row) -> str:
    """Return the gain of training, in points of accuracy."""
    last, first, aggregation = (
        f"{100 * gain[key]:+.1f}" for key in ("last", "first", "aggregation")
    )
    share = "" if gain["share"] is None else f", {percent(gain['share'])} of it"
    return (
        f"Training moved the last population by {last} points of accuracy, and the first by "
        f"{first}: aggregation's part is {aggregation} points{share}."
    )


def _draw(figure: Figure, rows: Sequence[Row]) -> None:
    axes = share_axes(figure, xlabel="step", ylim=(0, 1.03))
    for t in range(sum(key.startswith(ACCURACY) for key in rows[0]["episodes"])):
        points = [(row["step"], row["episodes"][f"{ACCURACY}{t}"]) for row in rows]
        curve(axes, f"population {t}", points, min(10, len(points) // 4), color=hue(t))
    axes.legend()
