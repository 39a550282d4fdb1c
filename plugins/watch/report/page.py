"""Tell the results of a run: the sections of every run, and those of some runs, in reading order.

They depend only on the files of the run directory, so the same files give the same bytes. They can
be made at any time, also for a run that failed or is still running.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cartridge_forge.plugins.statistics.formatting import TableSection
from cartridge_forge.plugins.statistics.gold import side_by_side
from cartridge_forge.plugins.watch.console import (
    GOLD_HEADS,
    HEADS,
    arm_rows,
    duration,
    gold_rows,
    number,
    percent,
    routing_text,
    summary,
)
from cartridge_forge.plugins.watch.report.channels import aggregation, channels, rewards
from cartridge_forge.plugins.watch.report.documents import documents
from cartridge_forge.plugins.watch.report.episodes import MonitorCounts, episode, monitors
from cartridge_forge.plugins.watch.report.evaluation import evaluation
from cartridge_forge.plugins.watch.report.frontier import frontier
from cartridge_forge.plugins.watch.report.plots import (
    LINES,
    PAINT,
    Curves,
    Plot,
    as_percent,
    by_arm,
    curve,
    share_axes,
)
from cartridge_forge.plugins.watch.report.template import Block, Row, shortened
from cartridge_forge.plugins.watch.report.votes import teachers
from cartridge_forge.protocols.files import iter_rows
from cartridge_forge.protocols.records.run_files import ARMS, PHASES, TRAINED_ARMS, WITHIN
from cartridge_forge.services.run_directory import RunDirectory, outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Means = dict[str, dict[str, float]]  # arm -> phase -> seconds

GOAL = 0.10  # the most of a step that orchestration should take
SAMPLES = 2  # rollouts and episodes shown of the first step and of the last
DASHES = {"none": ":", "document": "-.", "untrained": ":", "offline": "--", "on_policy": "--"}
QUESTIONS = (
    "Held-out questions, decoded greedily and sampled. An answer that names no option is unparsed "
    "and counts as wrong."
)
CASES = (
    "Held-out cases, decoded greedily and sampled. A case that could not be judged is unparsed and "
    "counts as wrong."
)

RUNS = (
    "Held-out problems, a run of recursive self-aggregation each, always sampled: the mean "
    "accuracy of the last population. Without an answer a candidate is unparsed and wrong."
)
AGREEMENT = (
    "Held-out questions of self-study: accuracy is the share of the teacher's tokens that the arm "
    "too holds likeliest, so that the teacher itself has 100%."
)
ROUTED = "Routed is on_policy over the cartridge that the router chooses by the question's words"


@dataclass(frozen=True)
class RunSections:
    """Hold what the page of a run's results shows, as `forge_run.report.template.render` does."""

    name: str
    header: list[Block]
    sections: dict[str, list[Block]]


def sections_of(run_path: Path) -> RunSections:
    """Return the results of a run directory, in sections; one without blocks is left out."""
    run = RunDirectory(run_path)
    metrics, events = list(iter_rows(run.metrics)), list(iter_rows(run.events))
    results = run.read_results() or {}
    arms = results.get("arms") or {}
    counts = MonitorCounts()
    samples = _samples(counts.watch(iter_rows(run.episodes)))
    sections: dict[str, list[Block]] = {
        "Arms": _arms(arms, _note(arms, counts)),
        "Start": start(run.start),
        "Right answers": gold(results.get("gold"), iter_rows(run.answers)),
        "Training": _training(metrics, phase_means(events), arms),
        "Rewards": rewards(metrics),
        "Aggregation": aggregation(metrics, results),
        "Channels": channels(metrics),
        "Teachers' votes": teachers(iter_rows(run.votes), iter_rows(run.ledger), metrics),
        "Monitors": monitors(counts),
        "Documents": documents(run.documents, arms, iter_rows(run.selfstudy)),
        "Test-time compute": frontier(run.path),
        "Evaluation": evaluation(run.path),
        "Compression and policy": _counters(results),
        "Sample rollouts": [
            *map(_rollout, _samples(iter_rows(run.rollouts))), *map(episode, samples),
        ] or [("text", "No rollout was recorded.")],
        "Spec": _spec(run.spec),
    }  # fmt: skip
    resolved = run.path.resolve()
    name = f"{resolved.parent.name} / {resolved.name}"
    present = {title: blocks for title, blocks in sections.items() if blocks}
    return RunSections(name, _header(results, events), present)


def phase_means(events: Iterable[Mapping[str, Any]]) -> Means:
    """Return arm -> phase (and "step") -> mean seconds. A step repeated after a resume counts
    once."""
    steps: dict[str, dict[int, Mapping[str, float]]] = {}
    for event in events:
        if event["event"] == "step" and event.get("seconds"):
            steps.setdefault(event["arm"], {})[event["step"]] = event["seconds"]
    return {
        arm: {
            name: math.fsum(seconds.get(name, 0.0) for seconds in phases.values()) / len(phases)
            for name in (*PHASES, *WITHIN, "step")
        }
        for arm, phases in steps.items()
    }


def _header(results: Row, events: list[Row]) -> list[Block]:
    status = str(results.get("status") or outcome(events))
    blocks: list[Block] = [(f"status {status}", summary({**results, "status": status}))]
    if times := [event["time"] for event in events]:
        blocks.append(("soft", f"{times[0]} to {times[-1]}"))
    if not results:
        blocks.append(
            ("text", "There is no results.json: this page shows what the run wrote so far.")
        )
    failed = [event for event in events if event["event"] == "failed"]
    if status == "failed" and failed:
        fields = {k: v for k, v in failed[-1].items() if k not in ("time", "event")}
        text = ", ".join(f"{key}: {value}" for key, value in fields.items())
        blocks.append(("error", text or "no reason was recorded"))
    return blocks


def _note(arms: Row, counts: MonitorCounts) -> str:
    if any("populations" in arm for arm in arms.values()):
        return RUNS
    if any("agreement" in arm and "f1" not in arm for arm in arms.values()):
        return AGREEMENT
    return CASES if counts.episodes else QUESTIONS


def _arms(arms: Row, note: str) -> list[Block]:
    if not arms:
        return [("text", "No arm has its final evaluation.")]
    heads = ("arm", "accuracy", *HEADS, "sampled", *HEADS)
    table = TableSection("Table of arms", heads, arm_rows(arms))
    blocks: list[Block] = [("soft", note), ("table", table)]
    if routing := routing_text(arms):
        blocks.append(("text", f"{ROUTED}: {routing}."))
    return blocks


def _training(metrics: list[Row], means: Means, arms: Row) -> list[Block]:
    plots = []
    if kl := by_arm(metrics, lambda row: row["kl"]):
        ends = (f"{a}: {p[0][1]:.3f} to {p[-1][1]:.3f} in {len(p)} steps" for a, p in kl.items())
        title, note = "KL to the document teacher, per token", f"{'; '.join(ends)}."
        plots.append(Plot(title, note, partial(_draw_kl, kl=kl)))
    if probes := by_arm(metrics, lambda row: row.get("accuracy")):
        note = (
            "Probe questions while training" + bool(arms) * "; lines are the arms' final accuracy"
        )
        draw = partial(_draw_accuracy, probes=probes, arms=arms)
        plots.append(Plot("Accuracy over steps", f"{note}.", draw))
    if means:
        shares = ", ".join(f"{arm} {percent(_share(phases))}" for arm, phases in means.items())
        note = f"Means. Orchestration: {shares}; the goal is {GOAL:.0%} of a step at most."
        plots.append(Plot("Seconds per step", note, partial(_draw_phases, means=means)))
    return [("plots", plots) if plots else ("text", "No step was recorded.")]


def _share(phases: dict[str, float]) -> float:
    return phases["orchestration"] / phases["step"] if phases["step"] else 0.0


def _draw_kl(figure: Figure, kl: Curves) -> None:
    axes = figure.add_subplot(xlabel="step", ylabel="nats per token")
    for arm, points in kl.items():
        style = {"color": PAINT[arm], "linestyle": LINES[arm]}
        curve(axes, arm, points, len(points) // 20, **style)
    axes.set_ylim(bottom=0)
    axes.legend()


def _draw_accuracy(figure: Figure, probes: Curves, arms: Row) -> None:
    axes = share_axes(figure, xlabel="step", ylim=(0, 1.03))
    for arm, points in probes.items():
        marker = "o" if arm == "on_policy" else "s"
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=PAINT[arm], marker=marker, markersize=3, label=arm)
    if not arms:  # otherwise the levels name the colours
        axes.legend()
    height = 0.0
    for level, arm in sorted((arms[arm]["accuracy"], arm) for arm in ARMS if arm in arms):
        axes.axhline(level, color=PAINT[arm], linestyle=DASHES[arm], linewidth=1)
        height = max(level, height)  # labels that would touch are moved up
        right_edge, label = axes.get_yaxis_transform(), f"{arm} {level:.0%}"
        axes.text(1.02, height, label, transform=right_edge, va="center", color=PAINT[arm])
        height += 0.065


def _draw_phases(figure: Figure, means: Means) -> None:
    bars, share = figure.subplots(2, 1, height_ratios=(3, 2))
    arms = [arm for arm in TRAINED_ARMS if arm in means][::-1]  # the first arm on top
    offsets = [0.0] * len(arms)
    for phase in PHASES:
        widths = [means[arm][phase] for arm in arms]
        bars.barh(arms, widths, left=offsets, color=PAINT[phase], label=phase, height=0.55)
        offsets = [a + b for a, b in zip(offsets, widths, strict=True)]
    bars.set_xlabel("seconds")
    bars.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1), fontsize=8, handlelength=1)
    shares = [_share(means[arm]) for arm in arms]
    share.barh(arms, shares, color=PAINT["orchestration"], height=0.45)
    share.axvline(GOAL, color=PAINT["ink"], linestyle="--", linewidth=1)
    share.set_xlim(0, max(1.5 * GOAL, 1.1 * max(shares, default=0.0)))
    as_percent(share.xaxis)
    share.set_xlabel(f"orchestration's share of a step (goal: at most {GOAL:.0%})")
    for axes in (bars, share):
        axes.grid(visible=False, axis="y")


def _counters(results: Row) -> list[Block]:
    compression, policy = results.get("compression") or {}, results.get("policy") or {}
    wall = results.get("wall_seconds")
    facts = {
        "KV tokens, document": number(compression.get("document_tokens"), ",.0f"),
        "KV tokens, cartridge": number(compression.get("cartridge_tokens"), ","),
        "compression, times": number(compression.get("ratio"), ".1f"),
        "rollouts": number(policy.get("rollouts"), ","),
        "tokens sampled": number(policy.get("tokens"), ","),
        "stale tokens": number(policy.get("stale_tokens"), ","),
    }
    for arm, tokens in (results.get("tokens_trained") or {}).items():
        facts[f"tokens trained, {arm}"] = number(tokens, ",")
    if verified := results.get("verified"):
        facts["accepted by the teacher"] = (
            f"{percent(verified['first'])} of the first verified rollout, "
            f"{percent(verified['last'])} of the last"
        )
        facts["tokens by the teacher"] = number(verified["taught"], ",")
    if cpu := results.get("cpu"):
        facts["CPU of controller and client"] = (
            f"{number(cpu['orchestration'], '.1f')} of {number(cpu['all'], ',.1f')} s, "
            f"{cpu['share']:.1%}"
        )
    facts["wall time"] = "-" if wall is None else duration(wall)
    return [("facts", facts)]


def _samples(rows: Iterable[Row]) -> list[Row]:
    """Return the first rows of the first and of the last step of each arm, in one pass."""
    arms: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        steps = arms.setdefault(row["arm"], {})
        if row["step"] not in steps and len(steps) == 2:
            steps.popitem()  # the newest step so far is not the last
        group = steps.setdefault(row["step"], [])
        if len(group) < SAMPLES:
            group.append(row)
    return [row for steps in arms.values() for group in steps.values() for row in group]


def _rollout(row: Row) -> Block:
    lo, hi = min(row["versions"], default=0), max(row["versions"], default=0)
    head = (
        f"{row['arm']}, step {row['step']}: {row['document']}, {row['kind']} "
        f"({len(row['response_ids'])} tokens, {row['finish_reason']}, "
        f"{'by the teacher' if hi < 0 else f'version {lo}' if lo == hi else f'versions {lo}-{hi}'}"
        f"{f', {len(taught)} tokens by the teacher' if (taught := row.get('taught')) else ''})"
    )
    return "talk", (head, [("student", shortened(row["text"]))])


def _spec(file: Path) -> list[Block]:
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if not text:
        return [("text", "There is no spec.yaml.")]
    return [("folded", ("The resolved spec", [("verbatim", text)]))]


GOLD_MEANING = (
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
        ("soft", GOLD_MEANING),
        ("table", TableSection("Right answers", GOLD_HEADS, gold_rows(results))),
    ]
    arms, shown_rows = side_by_side(rows)
    talks: list[Block] = [
        (
            "talk",
            (
                question,
                [("right", right), *((arm, shortened(answers.get(arm, ""))) for arm in arms)],
            ),
        )
        for question, right, answers in shown_rows
    ]
    return [*blocks, ("folded", (f"The arms' answers to {len(shown_rows)} questions", talks))]


def start(file: Path) -> list[Block]:
    """Return the ways in which the cartridges of a start.json begin, and the chain of runs and
    files behind each; nothing for a run without trained cartridges. Raises DataError for a damaged
    file."""
    if not file.is_file():
        return []
    # These import torch.
    from cartridge_forge.plugins.library.formats.run_checkpoint import read_start_record
    from cartridge_forge.plugins.library.starting import lineage, start_lines

    record = read_start_record(file)
    chains: dict[str, list[str]] = {}
    for name, one in record.items():
        if "source" in one:
            chains.setdefault(" after ".join(lineage({"start": one})), []).append(name)
    lines = [f"{', '.join(names)} came from {chain}" for chain, names in chains.items()]
    return [("list", [*start_lines(record), *lines])] if record else []
