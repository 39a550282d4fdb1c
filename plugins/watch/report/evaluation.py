"""Report `forge eval`: tables, two plots, Markdown, a page, and a section of report.html."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cartridge_forge.plugins.evaluate.records import EvalRow, Evaluation, OwnText
from cartridge_forge.plugins.statistics.formatting import (
    TableSection,
    count_text,
    markdown_table,
    markdown_text,
)
from cartridge_forge.plugins.watch.console import UNKNOWN, interval, number, percent
from cartridge_forge.plugins.watch.report.plots import (
    PAINT,
    Plot,
    error_bars,
    hue,
    legend,
    share_axes,
)
from cartridge_forge.plugins.watch.report.template import Block, render
from cartridge_forge.protocols.files import write_atomically
from cartridge_forge.protocols.records.run_files import ARMS
from cartridge_forge.services.run_directory import EVALUATION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADS = (
    "arm", "prefix", "compression", "trained on", "accuracy", "95%", "exact", "F1", "unparsed",
    "perplexity, answers", "text", "after own words", "KL to the teacher", "agreement",
    "KL elsewhere", "accuracy elsewhere",
)  # fmt: skip
OWN_HEADS = (
    "arm", "accuracy, sampled", "95%", "accepted", "greedy", "until refused", "greedy",
    "true sentences", "greedy", "KL of its text", "nats to the teacher", "forms obeyed",
)  # fmt: skip
PAIR_HEADS = ("arm", "over", "difference", "95%", "other side of zero")
TRAINED = ("offline", "hybrid", "on_policy", "routed", "retrieved_cartridge")
KINDS = {"none": "x", "document": "D", "truncated": "v", "untrained": "^", "offline": "s",
         "hybrid": "P", "on_policy": "o", "routed": "*", "retrieved": "d",
         "retrieved_cartridge": "p"}  # fmt: skip
BUDGETED = ("truncated", "retrieved", "untrained", *TRAINED)
HEIGHT = 3.6  # inches of a plot
BESIDE = 1.05  # factor between the x positions of kinds with one budget, which would overlap
NOTES = (
    "prefix: tokens before the question, means over documents; compression: document tokens over "
    "them; trained on: response tokens",
    "truncated: as much of the document as a prompt of the cartridge's budget holds; untrained: "
    "the cartridge where training starts; retrieved: passages of the budget that BM25 ranks first "
    "for a question, alone or over the cartridge",
    "exact and F1 as SQuAD normalises; an answer that cannot be read is unparsed, and wrong",
    "perplexity a token: of the right answers (of the teacher's where none are known), and of "
    "passages of the documents; after own words: of what the whole document's teacher writes where "
    "the arm began a passage",
    "KL and agreement: with the whole document's own sampled answers, nats and shares of tokens; "
    "an estimate of KL may fall a little below zero",
    "elsewhere: questions that have nothing to do with the document; KL from the model without a "
    "prefix on its own sampled answers there",
)
OWN_NOTES = (
    "by itself: what an arm writes where passages are asked for, sampled at temperature 1 and "
    "greedily, read by the model with the whole document",
    "accepted: the share of tokens that exact verification by that model accepts; until refused: "
    "the share before the first token that it gives less than 5%",
    "true sentences: the share of whole sentences whose words stand in the document",
    "KL of its text: KL(arm || teacher) along sampled tokens, nats a token; nats to the teacher: "
    "-log of the teacher's probability of them",
    "forms obeyed: of instructions about the form of an answer, over the prefix and without any",
)


def score_of(row: EvalRow) -> float:
    """Return accuracy, or agreement where no answers are known."""
    return row["teacher"]["top1"] if row["accuracy"] is None else row["accuracy"]


def section(evaluation: Evaluation) -> TableSection:
    """Return the table of the arms."""
    count, source = evaluation["rows"][0]["n"], evaluation["source"]
    title = f"{count} questions ({source}) over {evaluation['model']}"
    return TableSection(title, HEADS, tuple(map(cells, evaluation["rows"])))


def cells(row: EvalRow) -> tuple[str, ...]:
    """Return a row of the table, as texts."""
    forgot, passages, after_own = row["forgetting"], row["passages"], row.get("after_own")
    return (
        row["arm"], number(row["prefix_tokens"], ",.0f"),
        UNKNOWN if row["compression"] is None else f"{row['compression']:.1f}x",
        count_text(row["trained_tokens"]) if row["trained_tokens"] else UNKNOWN,
        percent(row["accuracy"]), interval(row["ci95"]) if row["ci95"] else UNKNOWN,
        percent(row["exact"]), percent(row["f1"]), str(row["parse_failures"]),
        f"{row['answers']['value']:.3g}",
        UNKNOWN if passages is None else f"{passages['value']:.3g}",
        UNKNOWN if after_own is None else f"{after_own['value']:.3g}",
        f"{row['teacher']['kl']:.3f}", percent(row["teacher"]["top1"]),
        UNKNOWN if forgot is None else f"{forgot['kl']:.3f}",
        UNKNOWN if forgot is None else
        f"{percent(forgot['accuracy'])} of {percent(forgot['accuracy_without'])}",
    )  # fmt: skip


def own_section(evaluation: Evaluation) -> TableSection | None:
    """Return the table of what the arms do by themselves, None where it was not measured."""
    rows = [row for row in evaluation["rows"] if row.get("free_running")]
    if not rows:
        return None
    left_out = max(free["ambiguous"] for row in rows if (free := row.get("free_running")))
    title = "what the arms do by themselves"
    if left_out:
        title += f"; {left_out} questions that fit several documents are left out"
    return TableSection(title, OWN_HEADS, tuple(map(own_cells, rows)))


def own_cells(row: EvalRow) -> tuple[str, ...]:
    """Return a row of that table, as texts."""
    free, formats = row.get("free_running"), row.get("formats")
    assert free is not None
    sampled, greedy = free["sampled"], free["greedy"]

    def share(text: OwnText | None, key: Literal["accepted", "until_refused", "precision"]) -> str:
        return UNKNOWN if text is None else percent(text[key])

    return (
        row["arm"], percent(free["accuracy"]),
        interval(free["ci95"]) if free["ci95"] else UNKNOWN,
        share(sampled, "accepted"), share(greedy, "accepted"),
        share(sampled, "until_refused"), share(greedy, "until_refused"),
        share(sampled, "precision"), share(greedy, "precision"),
        UNKNOWN if sampled is None else number(sampled["kl"], ".3f"),
        UNKNOWN if sampled is None else f"{sampled['teacher_nll']:.3f}",
        UNKNOWN if formats is None else
        f"{percent(formats['obeyed'])} of {percent(formats['obeyed_without'])}",
    )  # fmt: skip


def sections(evaluation: Evaluation) -> tuple[TableSection, ...]:
    """Return the tables of an evaluation."""
    tables = (section(evaluation), own_section(evaluation), pair_section(evaluation))
    return tuple(table for table in tables if table is not None)


def notes(evaluation: Evaluation) -> list[str]:
    """Return what the tables' columns mean, after the remarks."""
    measured = OWN_NOTES if own_section(evaluation) else ()
    return [*remarks(evaluation), *NOTES, *measured]


def pair_section(evaluation: Evaluation) -> TableSection:
    """Return the differences between every trained arm and each arm before it."""
    title = (
        f"differences in {evaluation['metric']}, paired bootstrap over {evaluation['clusters']} "
        f"{evaluation['resampled']}"
    )
    return TableSection(title, PAIR_HEADS, tuple(_pair_rows(evaluation)))


def _pair_rows(evaluation: Evaluation) -> Iterator[tuple[str, ...]]:
    kinds = {row["arm"]: row["kind"] for row in evaluation["rows"]}
    for pair in evaluation["pairs"]:
        if kinds[pair["b"]] in TRAINED:
            low, high = (100 * x for x in pair["ci95"])
            yield (
                pair["b"], pair["a"], f"{100 * pair['difference']:+.1f}",
                f"{low:+.1f} to {high:+.1f}", f"{pair['share']:.3f}",
            )  # fmt: skip


def remarks(evaluation: Evaluation) -> list[str]:
    """Return remarks beside the tables: contamination, and the evaluation's notes."""
    c = evaluation["contamination"]
    doubles = f"{c['exact']} exact and {c['near']} near doubles"
    where = f"; see {c['file']}" if c["file"] else ""
    return [
        f"contamination ({c['rule']}): {doubles} among {c['prompts']:,} training prompts and "
        f"{c['questions']} questions{where}",
        *evaluation["notes"],
    ]


def markdown(evaluation: Evaluation) -> str:
    """Return eval.md."""
    lines = ["# Evaluation", "", f"Runs: {', '.join(evaluation['runs'])}", ""]
    for one in sections(evaluation):
        lines += [f"## {markdown_text(one.title)}", "", markdown_table(one), ""]
    for plot in plots(evaluation):
        lines += [f"![{plot.title}]({plot.file})", ""]
    lines += [f"- {markdown_text(line)}" for line in notes(evaluation)]
    return "\n".join(lines) + "\n"


def evaluation(run: Path) -> list[Block]:
    """Return the blocks of eval.json; nothing for a run without an evaluation."""
    file = run / EVALUATION
    return blocks(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else []


def blocks(evaluation: Evaluation) -> list[Block]:
    """Return the tables, the plots and their notes."""
    titled = [
        block for one in sections(evaluation) for block in (("heading", one.title), ("table", one))
    ]
    return [*titled, ("plots", plots(evaluation)), ("list", notes(evaluation))]


def write_page(home: Path, evaluation: Evaluation) -> Path:
    """Write eval.html, one page that needs no network, and return its path."""
    path = home / "eval.html"
    name = f"evaluation of {', '.join(evaluation['runs'])}"
    write_atomically(path, render(name, [], {"Evaluation": blocks(evaluation)}))
    return path


def plots(evaluation: Evaluation) -> list[Plot]:
    """Return the plots, which are also files."""
    metric, rows = evaluation["metric"], evaluation["rows"]
    note = f"{rows[0]['n']} questions; bars are 95% intervals."
    draw = partial(_draw_compression, rows=rows, metric=metric)
    drawn = [Plot(f"{metric} against compression", note, draw, HEIGHT, "eval-compression.svg")]
    if any(row["trained_tokens"] for row in rows):
        note += " Lines are arms that no run trained."
        draw = partial(_draw_training, rows=rows, metric=metric)
        title = f"{metric} against training tokens"
        drawn.append(Plot(title, note, draw, HEIGHT, "eval-training.svg"))
    return drawn


def _draw_compression(figure: Figure, rows: Sequence[EvalRow], metric: str) -> None:
    label = "document tokens / prefix tokens"
    axes = share_axes(figure, xlabel=label, ylabel=metric, xscale="log", ylim=(0, 1.03))
    ticks: list[float] = []
    for ratio in sorted(row["compression"] for row in rows if row["compression"] is not None):
        if not ticks or ratio > 1.15 * ticks[-1]:  # keeps labels apart
            ticks.append(ratio)
    axes.set_xticks(ticks, [f"{times:.3g}x" for times in ticks])
    axes.set_xticks([], minor=True)
    places: list[float | None] = []
    for row in rows:  # kinds with one budget stand side by side
        kind, times = row["kind"], row["compression"]
        aside = BESIDE ** (BUDGETED.index(kind) - 2) if kind in BUDGETED else 1.0
        places.append(None if times is None else times * aside)
    _draw_rows(axes, rows, places)


def _draw_training(figure: Figure, rows: Sequence[EvalRow], metric: str) -> None:
    axes = share_axes(figure, xlabel="training tokens", ylabel=metric, ylim=(0, 1.03))
    axes.xaxis.set_major_formatter(lambda count, _: count_text(count))
    axes.set_xlim(0, 1.08 * max(row["trained_tokens"] for row in rows))
    _draw_rows(axes, rows, [r["trained_tokens"] if r["kind"] in TRAINED else None for r in rows])


def _draw_rows(axes: Axes, rows: Sequence[EvalRow], places: Sequence[float | None]) -> None:
    """Draw each row at its place on the x axis, or as a level where it has none."""
    placed = list(zip(places, rows, strict=True))
    for kind in KINDS:
        points = [(x, row) for x, row in placed if row["kind"] == kind and x is not None]
        if points:
            y = [score_of(row) for _, row in points]
            bars = [row["ci95"] or [v, v] for v, (_, row) in zip(y, points, strict=True)]
            error_bars(
                axes, [x for x, _ in points], y, bars, label=kind, color=_paint(kind),
                marker=KINDS[kind], markersize=5, linestyle="", elinewidth=0.7,
            )  # fmt: skip
    for x, row in placed:
        if x is None:
            color, label = _paint(row["kind"]), row["arm"]
            axes.axhline(score_of(row), color=color, linestyle=":", linewidth=1, label=label)
    legend(axes, ncols=4)


def _paint(kind: str) -> str:
    return (
        PAINT[kind]
        if kind in ARMS
        else hue(
            {"truncated": 4, "hybrid": 5, "retrieved": 7, "retrieved_cartridge": 8}.get(kind, 6)
        )
    )
