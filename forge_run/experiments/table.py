"""Tabulate and plot a sweep: a row of every arm at every point of the axes.

runs and their arms  ->  gather  ->  SweepRow, its values seed by seed  ->  table, markdown, page
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from cartridge_forge.forge_run.experiments.trials import Trial
from cartridge_forge.plugins.evaluate.spec import SweepSpec
from cartridge_forge.plugins.replay.ledger import RunSpending
from cartridge_forge.plugins.statistics.formatting import (
    TableSection,
    count_text,
    markdown_table,
    markdown_text,
)
from cartridge_forge.plugins.statistics.intervals import SHARE, SHARE_DIFFERENCE, mean_interval
from cartridge_forge.plugins.watch.console import UNKNOWN, percent
from cartridge_forge.plugins.watch.report.plots import (
    HUES,
    MARKERS,
    Plot,
    as_percent,
    error_bars,
    hue,
    legend,
    share_axes,
)
from cartridge_forge.plugins.watch.report.template import Block, render
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.services.run_directory import RunDirectory, iter_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, Sequence[float]]  # x, and the accuracies of the seeds
P_KEY = "cartridge.tokens"
HEIGHT = 3.6  # inches of a plot
NOTE = (
    "Accuracy on held-out questions, decoded greedily: the mean over the seeds, with Student's 95% "
    "interval. Compression is KV tokens of the document over those of the cartridge."
)


@dataclass(frozen=True)
class SweepRow:
    """Hold the results of one arm at one point; `accuracy` and `unparsed` have a value for each
    seed. `tokens` is the mean over the seeds of the tokens trained on; `compression` is 1 for an
    arm that reads the document, None without a prefix. Of a run with episodes `reward` is the mean
    of the last quarter of the steps, and `dollars` the mean over the seeds of what external
    teachers cost; empty and 0 otherwise."""

    point: dict[str, Any]  # key of an axis -> its value
    arm: str
    seeds: tuple[int, ...]
    accuracy: tuple[float, ...]
    unparsed: tuple[int, ...]
    questions: int
    tokens: float
    compression: float | None
    reward: tuple[float, ...] = ()
    dollars: float = 0.0

    @property
    def mean(self) -> float:
        return fmean(self.accuracy)

    @property
    def ci95(self) -> tuple[float, float] | None:
        """Return the interval of the mean, within 0..1; None with one seed."""
        return mean_interval(self.accuracy, SHARE)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "mean": self.mean, "ci95": self.ci95}


def gather(runs: Iterable[tuple[Trial, RunDirectory]]) -> list[SweepRow]:
    """Return a row of every arm at every point, from the results of its seeds' runs, in their
    order."""
    groups: dict[tuple[str, str], list[tuple[Trial, str, RunDirectory]]] = {}
    for trial, directory in runs:
        for arm, name in trial.arms:
            groups.setdefault((json.dumps(trial.point), name), []).append((trial, arm, directory))
    rows = []
    for (_, name), members in groups.items():
        trial, arm, _ = members[0]
        outcomes: list[Mapping[str, Any]] = [run.read_results() or {} for *_, run in members]
        rewards = [_reward(run, arm) for *_, run in members]
        measured = [results["arms"][arm] for results in outcomes]
        ratio = fmean(results["compression"]["ratio"] for results in outcomes)
        rows.append(
            SweepRow(
                point=trial.point,
                arm=name,
                seeds=tuple(t.seed for t, *_ in members),
                accuracy=tuple(m["accuracy"] for m in measured),
                unparsed=tuple(m["parse_failures"] for m in measured),
                questions=sum(m["n"] for m in measured),
                tokens=fmean(results["tokens_trained"].get(arm, 0) for results in outcomes),
                compression={"none": None, "document": 1.0}.get(arm, ratio),
                reward=() if None in rewards else tuple(r for r in rewards if r is not None),
                dollars=fmean(_dollars(run) for *_, run in members),
            )
        )
    return rows


def _reward(run: RunDirectory, arm: str) -> float | None:
    """Return the mean reward of an arm's last quarter of steps; None of a run without episodes."""
    rows = (row for row in iter_rows(run.metrics) if row["arm"] == arm)
    rewards = [r for row in rows if (r := (row.get("episodes") or {}).get("reward")) is not None]
    return fmean(rewards[-max(1, len(rewards) // 4) :]) if rewards else None


def _dollars(run: RunDirectory) -> float:
    return math.fsum(RunSpending(run.ledger).total()["dollars"].values())


def table(spec: SweepSpec, rows: Sequence[SweepRow]) -> tuple[TableSection, ...]:
    """Return a table of every row, and of each arm over the reference, over all points."""
    seeds = len(rows[0].seeds)
    title = f"sweep {spec.name}, {seeds} seed{'s' if seeds > 1 else ''}"
    comparison = (f"over {spec.reference}", "95% CI") if spec.reference else ()
    with_reward = any(row.reward for row in rows)
    columns = (
        "arm", *(key.rpartition(".")[2] for key in spec.axes), "compression", "accuracy", "95% CI",
        *comparison, *(("reward", "95% CI", *comparison, "teachers") if with_reward else ()),
        "unparsed", "questions", "tokens trained",
    )  # fmt: skip
    gains = [_gains(spec, rows, row, "accuracy") for row in rows]
    cells = tuple(
        _cells(spec, row, gain, _reward_cells(spec, rows, row) if with_reward else ())
        for row, gain in zip(rows, gains, strict=True)
    )
    sections = [TableSection(title, columns, cells)]
    # Points of a seed share documents and questions, so each seed gives one value: the mean over
    # its points.
    overall = []
    for arm in dict.fromkeys(row.arm for row in rows):
        arm_gains = [gain for row, gain in zip(rows, gains, strict=True) if row.arm == arm and gain]
        if arm_gains:
            overall.append(
                (arm, *_gain_cells([fmean(column) for column in zip(*arm_gains, strict=True)]))
            )
    if overall:
        title = f"over {spec.reference}, all points together"
        sections.append(TableSection(title, ("arm", "mean", "95% CI"), tuple(overall)))
    return tuple(sections)


def _cells(
    spec: SweepSpec, row: SweepRow, gain: Sequence[float] | None, reward: Sequence[str]
) -> tuple[str, ...]:
    return (
        row.arm,
        *(value if isinstance(value, str) else json.dumps(value) for value in row.point.values()),
        UNKNOWN if row.compression is None else f"{row.compression:.1f}x",
        percent(row.mean),
        interval_text(row.ci95, ".1f", 100),
        *(_gain_cells(gain) if spec.reference else ()),
        *reward,
        str(sum(row.unparsed)),
        str(row.questions),
        count_text(row.tokens) if row.tokens else UNKNOWN,
    )


def _gain_cells(gain: Sequence[float] | None) -> tuple[str, str]:
    if gain is None:
        return UNKNOWN, UNKNOWN
    return f"{fmean(gain):+.1%}", interval_text(mean_interval(gain, SHARE_DIFFERENCE), "+.1f", 100)


def _reward_cells(spec: SweepSpec, rows: Sequence[SweepRow], row: SweepRow) -> tuple[str, ...]:
    comparison: tuple[str, ...] = ()
    if spec.reference:
        gain = _gains(spec, rows, row, "reward") if row.reward else None
        comparison = (UNKNOWN, UNKNOWN) if gain is None else (
            f"{fmean(gain):+.3f}", interval_text(mean_interval(gain), "+.3f"),
        )  # fmt: skip
    mean = f"{fmean(row.reward):.3f}" if row.reward else UNKNOWN
    interval = interval_text(mean_interval(row.reward) if row.reward else None, ".3f")
    return mean, interval, *comparison, f"${row.dollars:.4f}"


def _gains(
    spec: SweepSpec, rows: Sequence[SweepRow], row: SweepRow, figure: str
) -> list[float] | None:
    """Return a row's figure minus the reference's at its point, by seed; None for the reference.
    Raises RunError for arms of other seeds."""
    other = next((r for r in rows if r.arm == spec.reference and r.point == row.point), row)
    if row.arm == other.arm:
        return None
    if row.seeds != other.seeds:
        raise RunError(f"{row.arm} and {other.arm} have other seeds; run the sweep again")
    pairs = zip(getattr(row, figure), getattr(other, figure), strict=True)
    return [value - reference for value, reference in pairs]


def interval_text(interval: Sequence[float] | None, form: str, scale: float = 1) -> str:
    """Return both ends as text: `((-0.1, 0.25), "+.1f", 100)` -> "-10.0 .. +25.0"; "-" for None."""
    return UNKNOWN if interval is None else " .. ".join(format(scale * x, form) for x in interval)


def markdown(spec: SweepSpec, rows: Sequence[SweepRow]) -> str:
    """Return the tables in Markdown, for documentation."""
    parts = [f"# Sweep {spec.name}\n\n{NOTE}\n"]
    for part in table(spec, rows):
        parts.append(f"## {markdown_text(part.title)}\n\n{markdown_table(part)}\n")
    return "\n".join(parts)


def page_of(spec: SweepSpec, rows: Sequence[SweepRow]) -> str:
    """Return sweep.html: the tables and plots."""
    sections: dict[str, list[Block]] = {s.title: [("table", s)] for s in table(spec, rows)}
    sections["Plots"] = [("plots", plots(spec, rows))]
    return render(f"sweep {spec.name}", [("soft", NOTE)], sections)


def plots(spec: SweepSpec, rows: Sequence[SweepRow]) -> list[Plot]:
    """Return plots of accuracy against every axis and training tokens; without axes, of each arm.
    They are also files."""
    bars, drawn = "bars are 95% intervals", []
    for key in spec.axes:
        name = "compression" if key == P_KEY else key
        note = f"Means over the seeds and all other axes; {bars} over the seeds."
        draw = partial(_draw_axis, key=key, rows=rows)
        drawn.append(Plot(f"Accuracy against {name}", note, draw, HEIGHT, f"sweep-{name}.svg"))
    if spec.axes:
        title, file = "Accuracy against training tokens", "sweep-tokens.svg"
        note = f"A point is one arm at one combination of the axes; {bars}."
        draw = partial(_draw_tokens, rows=[row for row in rows if row.tokens])
    else:
        title, file = "Accuracy of each arm", "sweep-arms.svg"
        note = f"Means over the seeds; {bars} over them."
        draw = partial(_draw_arms, rows=rows)
    return [*drawn, Plot(title, note, draw, HEIGHT, file)]


def positions(key: str, rows: Sequence[SweepRow]) -> tuple[dict[str, float], bool]:
    """Return the x position of each value of an axis, keyed by its JSON, and whether x is a number.
    P is placed by its compression, other numbers by value, anything else by its index."""
    values = {json.dumps(row.point[key]): row.point[key] for row in rows}
    if key == P_KEY:
        ratios = {
            json.dumps(row.point[key]): row.compression
            for row in rows
            if row.compression is not None and row.compression != 1
        }
        if ratios.keys() == values.keys():
            return ratios, True
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values.values()):
        return {text: float(value) for text, value in values.items()}, True
    return {text: float(i) for i, text in enumerate(values)}, False


def _draw_axis(figure: Figure, key: str, rows: Sequence[SweepRow]) -> None:
    x_of, numbers = positions(key, rows)
    ticks = sorted(x_of, key=lambda text: x_of[text])
    axes = share_axes(figure, xlabel="compression" if key == P_KEY else key)
    if numbers and min(x_of.values()) > 0:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(
        [x_of[text] for text in ticks],
        [f"{x_of[text]:.0f}x" if key == P_KEY else text for text in ticks],
    )
    points: dict[str, dict[float, list[Sequence[float]]]] = {row.arm: {} for row in rows}
    for row in rows:
        points[row.arm].setdefault(x_of[json.dumps(row.point[key])], []).append(row.accuracy)
    curves = {
        arm: [(x, [fmean(seed) for seed in zip(*seeds, strict=True)]) for x, seeds in xs.items()]
        for arm, xs in points.items()
    }
    _draw_curves(axes, curves, joined=True)


def _draw_tokens(figure: Figure, rows: Sequence[SweepRow]) -> None:
    curves: dict[str, list[Point]] = {}
    for row in rows:
        curves.setdefault(row.arm, []).append((row.tokens, row.accuracy))
    _draw_curves(share_axes(figure, xlabel="tokens trained"), curves, joined=False)


def _draw_arms(figure: Figure, rows: Sequence[SweepRow]) -> None:
    axes = share_axes(figure, xlabel="accuracy")
    as_percent(axes.xaxis)
    for i, row in enumerate(rows):
        low, high = row.ci95 or (row.mean, row.mean)
        axes.plot([low, high], [i, i], color=hue(0), linewidth=0.7)
        axes.plot(row.mean, i, color=hue(0), marker="o", markersize=4)
    axes.set_yticks(range(len(rows)), [row.arm for row in rows], fontsize=7)
    axes.invert_yaxis()


def _draw_curves(axes: Axes, curves: Mapping[str, Sequence[Point]], *, joined: bool) -> None:
    """Draw each arm's points from left to right: the mean over the seeds with its interval."""
    for i, (arm, points) in enumerate(curves.items()):
        x, y = zip(*sorted(points, key=lambda point: point[0]), strict=True)
        means = [fmean(values) for values in y]
        spans = [mean_interval(values, SHARE) or (m, m) for values, m in zip(y, means, strict=True)]
        error_bars(
            axes, x, means, spans, label=arm, color=hue(i), marker=MARKERS[i % len(MARKERS)],
            markersize=4, linewidth=1, elinewidth=0.5,
            linestyle="" if not joined else "-" if i < len(HUES) else "--",
        )  # fmt: skip
    if curves:
        legend(axes, ncols=3)
