"""Tell the results of a run: the sections of every run, and those of some runs, in reading order.

They depend only on the files of the run directory, so the same files give the same bytes. They can
be made at any time, also for a run that failed or is still running.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.statistics.formatting import TableSection
from cartridge_forge.plugins.statistics.gold import side_by_side
from cartridge_forge.plugins.watch.console import (
    GOLD_HEADS,
    HEADS,
    arm_rows,
    duration,
    gold_rows,
    measure_name,
    number,
    percent,
    routing_text,
    rules_table,
    summary,
)
from cartridge_forge.plugins.watch.report.channels import aggregation, channels, rewards
from cartridge_forge.plugins.watch.report.documents import documents
from cartridge_forge.plugins.watch.report.episodes import MonitorCounts, episode, monitors
from cartridge_forge.plugins.watch.report.evaluation import evaluation
from cartridge_forge.plugins.watch.report.frontier import frontier
from cartridge_forge.plugins.watch.report.template import Block, Row, shortened
from cartridge_forge.plugins.watch.report.votes import teachers
from cartridge_forge.protocols.files import iter_rows
from cartridge_forge.protocols.records.run_files import PHASES, TRAINED_ARMS, WITHIN
from cartridge_forge.services.run_directory import RunDirectory, outcome

Means = dict[str, dict[str, float]]  # arm -> phase -> seconds

TRAINING = (
    "KL per token to the teacher, in nats, and the accuracy of validations: of the first step and "
    "of the last. Seconds are means of a step; orchestration should take 10% of one at most. The "
    "page Run draws the curves."
)
TRAINING_HEADS = (
    "arm", "steps", "KL, first", "last", "validation, first", "last", *PHASES, "step",
    "orchestration",
)  # fmt: skip
SAMPLES = 2  # rollouts and episodes shown of the first step and of the last
QUESTIONS = (
    "Held-out questions, decoded greedily and sampled. An answer that names no option is unparsed "
    "and counts as wrong."
)
CASES = (
    "Held-out cases, decoded greedily and sampled. A case that could not be judged is unparsed and "
    "counts as wrong."
)

RULES = (
    "The share of held-out tasks, decoded greedily, that obey each rule of the handbook, by the "
    "tasks' number of turns. All counts tasks that obey every rule that governs them."
)
RUNS = (
    "Held-out problems, a run of recursive self-aggregation each, always sampled: the mean "
    "accuracy of the last population. Without an answer a candidate is unparsed and wrong."
)
AGREEMENT = (
    "Held-out questions of self-study: agreement is the share of the teacher's tokens that the arm "
    "too holds likeliest, so that the teacher itself has 100%."
)
ROUTED = "Routed is on_policy over the cartridge that the router chooses by the question's words"


@dataclass(frozen=True)
class RunSections:
    """Hold what the page of a run's results shows, as `plugins.watch.report.template.render`
    does."""

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
        "Rules": _rules(arms),
        "Start": start(run.start),
        "Right answers": gold(results.get("gold"), iter_rows(run.answers)),
        "Training": _training(metrics, phase_means(events)),
        "Rewards": rewards(metrics),
        "Aggregation": aggregation(results),
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
    if measure_name(arms) == "agreement":
        return AGREEMENT
    return CASES if counts.episodes else QUESTIONS


def _arms(arms: Row, note: str) -> list[Block]:
    if not arms:
        return [("text", "No arm has its final evaluation.")]
    heads = ("arm", measure_name(arms), *HEADS, "sampled", *HEADS)
    table = TableSection("Table of arms", heads, arm_rows(arms))
    blocks: list[Block] = [("soft", note), ("table", table)]
    if routing := routing_text(arms):
        blocks.append(("text", f"{ROUTED}: {routing}."))
    return blocks


def _rules(arms: Row) -> list[Block]:
    """Return the table of a handbook's rules; nothing without them."""
    table = rules_table(arms)
    return [] if table is None else [("soft", RULES), ("table", table)]


def _training(metrics: Sequence[Row], means: Means) -> list[Block]:
    """Return the table of the trained arms: KL and validations at both ends, and seconds."""
    lines = []
    for arm in TRAINED_ARMS:
        rows = [row for row in metrics if row["arm"] == arm]
        if not rows and arm not in means:
            continue
        kl = [row["kl"] for row in rows if row["kl"] is not None] or [None]
        validations = [row["accuracy"] for row in rows if row.get("accuracy") is not None] or [None]
        seconds = means.get(arm, {})
        share = seconds["orchestration"] / seconds["step"] if seconds.get("step") else None
        lines.append(
            (
                arm, f"{len(rows):,}", *(number(kl[end], ".3f") for end in (0, -1)),
                *(percent(validations[end]) for end in (0, -1)),
                *(number(seconds.get(phase), ".2f") for phase in (*PHASES, "step")),
                percent(share),
            )
        )  # fmt: skip
    if not lines:
        return [("text", "No step was recorded.")]
    return [("soft", TRAINING), ("table", TableSection("Training", TRAINING_HEADS, tuple(lines)))]


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
    from cartridge_forge.plugins.library.starts.trained import lineage, start_lines

    record = read_start_record(file)
    chains: dict[str, list[str]] = {}
    for name, one in record.items():
        if "source" in one:
            chains.setdefault(" after ".join(lineage({"start": one})), []).append(name)
    lines = [f"{', '.join(names)} came from {chain}" for chain, names in chains.items()]
    return [("list", [*start_lines(record), *lines])] if record else []
