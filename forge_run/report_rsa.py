"""The report's section on recursive self-aggregation: how good each population was.

From results.json, the arms' populations and what training gained; from metrics.jsonl, the accuracy
of each population of the training problems by step. A run without populations has no such section.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from forge_run.display import percent
from forge_run.page import HUES, PAINT, Row, curve, figure, section, table
from protocols.records import ARMS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCURACY = "rsa/accuracy_"  # of a row's episodes, and then the population's number


def aggregation(metrics: Sequence[Row], results: Row) -> str:
    """ "" without any population."""
    arms = results.get("arms") or {}
    told = {
        arm: arms[arm]["populations"] for arm in ARMS if (arms.get(arm) or {}).get("populations")
    }
    rows = [row for row in metrics if f"{ACCURACY}0" in (row.get("episodes") or {})]
    parts = []
    if rows:
        title, note = "Accuracy of each population", "Problems that are trained on, by step."
        plot = figure(title, note, partial(_draw, rows=rows))
        parts.append(f'<div class="plots">\n{plot}</div>')
    if told:
        steps = max(len(populations["accuracy"]) for populations in told.values())
        heads = ("arm", *(f"population {t}" for t in range(steps)), "majority", "pass at n")
        lines = [
            (arm, *map(percent, [*p["accuracy"], p["majority_vote"], p["pass_at_n"]]))
            for arm, p in told.items()
        ]
        name = "Accuracy of each population on held-out problems"
        parts += [f'<p class="soft">{name}.</p>', table(name, heads, lines)]
    if gain := results.get("aggregation"):
        parts.append(f"<p>{_told(gain)}</p>")
    return section("Aggregation", "\n".join(parts)) if parts else ""


def _told(gain: Row) -> str:
    """What training gained, in points of accuracy."""
    last, first, own = (f"{100 * gain[key]:+.1f}" for key in ("last", "first", "aggregation"))
    share = "" if gain["share"] is None else f", {percent(gain['share'])} of it"
    return (
        f"Training moved the last population by {last} points of accuracy, and the first by "
        f"{first}: aggregation's part is {own} points{share}."
    )


def _draw(figure: Figure, rows: Sequence[Row]) -> None:
    axes = figure.add_subplot(xlabel="step", ylim=(0, 1.03))
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    x = [row["step"] for row in rows]
    for t in range(sum(key.startswith(ACCURACY) for key in rows[0]["episodes"])):
        y = [row["episodes"][f"{ACCURACY}{t}"] for row in rows]
        color = PAINT[HUES[t % len(HUES)]]
        curve(axes, f"population {t}", x, y, min(10, len(y) // 4), color=color)
    axes.legend()
