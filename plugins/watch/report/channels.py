"""Report the loss channels of a run with episodes, from metrics.jsonl.

    rewards    mean reward and the errors that turns met, by step
    channels   each channel's loss, the cosines of their gradients, and the last numbers

A run without episodes has neither section.

Recursive self-aggregation has the accuracy of each population:

From results.json come the arms' populations and the gain of training; from metrics.jsonl the
accuracy of each population of the training problems by step. A run without populations has no such
section.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from cartridge_forge.plugins.statistics.formatting import TableSection
from cartridge_forge.plugins.watch.console import number, percent
from cartridge_forge.plugins.watch.report.plots import (
    LINES,
    PAINT,
    Plot,
    by_arm,
    curve,
    hue,
    share_axes,
)
from cartridge_forge.plugins.watch.report.template import Block, Row
from cartridge_forge.protocols.records.run_files import ARMS, TRAINED_ARMS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOW = 10  # steps of a trailing mean at most, and a quarter of the run's at most
ERROR = "error/"  # key prefix in a row's episodes: turns that met that kind
BALANCE = ("coefficient", "share")  # of a channel whose gradient is balanced with the others'
# Keys of a channel that have columns; its other keys are facts.
OWN_COLUMNS = ("weight", "value", "count", "grad_norm", "mean_grad_norm", *BALANCE)
PANEL = 1.3  # inches that one row of small multiples is high
HEADS = ("channel", "weight", "value", "denominator", "facts")


def rewards(metrics: Sequence[Row]) -> list[Block]:
    """Return plots of rewards and errors; nothing without episodes."""
    rows = [row for row in metrics if row.get("episodes")]
    if not rows:
        return []
    plots = []
    if any("reward" in row["episodes"] for row in rows):
        title = "Mean reward of a step's episodes"
        plots.append(Plot(title, _reward_note(rows), partial(_draw_rewards, rows=rows)))
    if met := _errors(rows):
        draw = partial(_draw_errors, rows=rows, kinds=[kind for kind, _ in met])
        turns = sum(row["episodes"]["turns"] for row in rows)
        note = "; ".join(f"{kind}: {n:,} of {turns:,} turns" for kind, n in met)
        plots.append(Plot("Turns that met an error", f"{note}.", draw))
    if plots:
        return [("plots", plots)]
    # Every environment failed before its first observation.
    episodes = sum(row["episodes"]["count"] for row in rows)
    return [("text", f"None of {episodes:,} episodes could be judged.")]


def channels(metrics: Sequence[Row]) -> list[Block]:
    """Return plots of every channel over the steps, and tables of the last step."""
    rows = [row for row in metrics if row.get("channels")]
    if not rows:
        return []
    names = _names(row["channels"] for row in rows)
    title = "Value of each channel"
    note = "Each over its own denominator, before its weight; where that is 0, nothing is drawn."
    draw = partial(_draw_panels, rows=rows, names=names, value=_value)
    plots = [Plot(title, note, draw, _height(names))]
    if pairs := _names(row.get("cosines") or {} for row in rows):
        title = "Cosines between the channels' gradients"
        note = "Below 0 two channels pull against each other."
        draw = partial(_draw_panels, rows=rows, names=pairs, value=_cosine, signed=True)
        plots.append(Plot(title, note, draw, _height(pairs)))
    return [("plots", plots), *_tables(rows, names)]


def _tables(rows: Sequence[Row], names: Sequence[str]) -> Iterable[Block]:
    """Yield the channels of each arm's last step, and its last comparison of their gradients."""
    for arm in TRAINED_ARMS:
        of_arm = [row for row in rows if row["arm"] == arm]
        if not of_arm:
            continue
        last = of_arm[-1]
        normed = [row for row in of_arm if _norms(row)]
        compared = [row for row in normed if row.get("cosines")] or normed
        at = f"{arm}, step {last['step']}"
        lines = tuple(_cells(name, last["channels"].get(name)) for name in names)
        yield "heading", at
        yield "table", TableSection(f"Channels, {at}", HEADS, lines)
        if compared:
            table = _gradients(arm, compared[-1])
            yield "soft", f"{table.title}."
            yield "table", table


def _norms(row: Row) -> dict[str, float]:
    """Return the norm of each channel's gradient, if the step compared them."""
    channels = row["channels"].items()
    return {name: facts["grad_norm"] for name, facts in channels if "grad_norm" in facts}


def _cells(name: str, facts: Row | None) -> tuple[str, ...]:
    if facts is None:
        return (name, *["-"] * 4)
    value = facts["value"] if facts["count"] else None
    fact_texts = [f"{key} {fact:.3g}" for key, fact in facts.items() if key not in OWN_COLUMNS]
    return (
        name, f"{facts['weight']:g}", number(value, ".4f"), number(facts["count"], ","),
        ", ".join(fact_texts) or "-",
    )  # fmt: skip


def _gradients(arm: str, row: Row) -> TableSection:
    """Return norms and cosines of one step, a row for each channel that had a gradient, with
    coefficients and shares where the channels were balanced."""
    norms, cosines = _norms(row), row.get("cosines") or {}
    balanced = [key for key in BALANCE if any(key in row["channels"][name] for name in norms)]
    lines = []
    for one in norms:
        of_one = [cosines.get(f"{one}/{other}", cosines.get(f"{other}/{one}")) for other in norms]
        cells = [number(cosine, "+.2f") for cosine in of_one]
        facts = [number(row["channels"][one].get(key), ".3g") for key in balanced]
        lines.append((one, number(norms[one], ".3g"), *facts, *cells))
    heads = ("channel", "norm", *balanced, *(f"cosine to {name}" for name in norms))
    return TableSection(f"Gradients of {arm}, step {row['step']}", heads, tuple(lines))


def _names(mappings: Iterable[Row]) -> list[str]:
    """Return all keys, in the order of their first occurrence."""
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _errors(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Return the kinds of error with the turns that met them, the most frequent first."""
    met: Counter[str] = Counter()
    for row in rows:
        counts = row["episodes"].items()
        met.update({k.removeprefix(ERROR): n for k, n in counts if k.startswith(ERROR)})
    return sorted(met.items(), key=lambda item: (-item[1], item[0]))


def _reward(row: Row) -> float | None:
    return row["episodes"].get("reward")


def _reward_note(rows: Sequence[Row]) -> str:
    notes = []
    for arm, points in by_arm(rows, _reward).items():
        of_arm = [row["episodes"] for row in rows if row["arm"] == arm]
        count, errored = (sum(e[key] for e in of_arm) for key in ("count", "errored"))
        notes.append(
            f"{arm}: {points[0][1]:.3f} to {points[-1][1]:.3f} in {len(of_arm)} steps, "
            f"{count:,} episodes, of which {errored:,} errored"
        )
    return "; ".join(notes) + "."


def _error_share(row: Row, kind: str) -> float:
    return row["episodes"].get(ERROR + kind, 0) / row["episodes"]["turns"]


def _draw_rewards(figure: Figure, rows: Sequence[Row]) -> None:
    axes = figure.add_subplot(xlabel="step", ylabel="reward")
    for arm, points in by_arm(rows, _reward).items():
        curve(axes, arm, points, min(WINDOW, len(points) // 4), color=PAINT[arm])
    axes.legend()


def _draw_errors(figure: Figure, rows: Sequence[Row], kinds: Sequence[str]) -> None:
    axes = share_axes(figure, xlabel="step")
    counted = [row for row in rows if row["episodes"]["turns"]]
    for index, kind in enumerate(kinds):
        for arm, points in by_arm(counted, partial(_error_share, kind=kind)).items():
            label = kind if arm == rows[0]["arm"] else None
            curve(axes, label, points, 1, color=hue(index), linestyle=LINES[arm])
    axes.set_ylim(bottom=0)
    axes.legend()


def _height(panels: Sequence[str]) -> float:
    return 0.4 + PANEL * ((len(panels) + 1) // 2)


def _value(row: Row, name: str) -> float | None:
    """Return a channel's value in a step; None for an empty denominator."""
    facts = row["channels"].get(name)
    return facts["value"] if facts and facts["count"] else None


def _cosine(row: Row, name: str) -> float | None:
    return (row.get("cosines") or {}).get(name)


def _draw_panels(
    figure: Figure,
    rows: Sequence[Row],
    names: Sequence[str],
    value: Callable[..., float | None],
    signed: bool = False,
) -> None:
    """Draw small multiples over the same steps, coloured by panel, or with `signed` by arm."""
    steps = [row["step"] for row in rows]
    for index, name in enumerate(names):
        title = name.replace("/", ", ")
        axes = figure.add_subplot((len(names) + 1) // 2, 2, index + 1, title=title)
        if signed:
            axes.set_ylim(-1.05, 1.05)
            axes.axhline(0, color=PAINT["soft"], linewidth=0.8)
        for arm, points in by_arm(rows, partial(value, name=name)).items():
            color, line = (PAINT[arm], "-") if signed else (hue(index), LINES[arm])
            axes.plot(*zip(*points, strict=True), color=color, ls=line, marker="o", markersize=2)
        axes.set_xlim(min(steps) - 0.5, max(steps) + 0.5)  # room for the marks
    figure.supxlabel("step", fontsize=9)


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
