"""Make the tables of README.md and docs/ from the raw results kept here.

A table stands below a mark:

    <!-- record: longhealth arms -->             made from the record `longhealth` by TABLES["arms"]
    <!-- no record -->                            published before raw results were kept
    <!-- settings -->                             numbers that are no results

A page may have one mark for all its tables: `<!-- no record: whole page -->`. A table of three
decimals or percentages without a mark is a fault, and so is one of other numbers than its record's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.results import records
from benchmarks.results.corpus_tables import seeds, shared_facts
from benchmarks.results.host_tables import limits, publishes, results_of, simulated
from benchmarks.results.merging_tables import (
    merging_arms,
    merging_differences,
    trained_to_aggregate,
)
from benchmarks.results.on_policy_tables import every_arm, primary, secondary
from benchmarks.results.real_study import real_arms, real_primary, real_secondary
from benchmarks.results.real_tables import articles, right_answers
from benchmarks.results.study_tables import between, collapses, over_reference
from protocols.files import REPOSITORY
from protocols.records.intervals import wilson_interval
from training.evaluation.comparison import AnswerSource, compare_groups, grouped

PAGES = (
    "README.md",
    "docs/corpus.md",
    "docs/how-to/make.md",
    "docs/how-to/vllm.md",
    "docs/real.md",
    "docs/studies/aggregation.md",
    "docs/studies/ahead.md",
    "docs/studies/channels.md",
    "docs/studies/lengths.md",
    "docs/studies/on_policy.md",
    "docs/studies/real.md",
    *(f"docs/explanation/{name}.md" for name in (
        "cartridges", "channels", "compression", "on_policy", "performance", "results", "rsa",
        "scaling", "test_time_compute",
    )),
)  # fmt: skip
RESULT = re.compile(r"\d(?:\.\d|%)")
MARK = re.compile(r"<!-- (record|no record|settings)(?:: ?(.*?))? -->")
WHOLE_PAGE = "<!-- no record: whole page -->"
NOT_KEPT = "before raw results were kept"  # what a reader is told where there is no record
ARM_NAMES = {
    "none": "no document",
    "document": "whole document in context",
    "untrained": "first 28 tokens, untrained",
    "offline": "offline, equal tokens",
    "on_policy": "**on policy**",
}

Lines = list[str]


@dataclass(frozen=True)
class DocTable:
    """Hold a table of a page: its first line's number from 1, its lines, and its mark."""

    page: Path
    line: int
    lines: tuple[str, ...]
    kind: str
    argument: str

    @property
    def has_results(self) -> bool:
        cells = (cell for line in self.lines[2:] for cell in line.split("|"))
        return sum(RESULT.search(cell) is not None for cell in cells) >= 3


def table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> Lines:
    """Return the lines of a Markdown table."""
    first, *rest = [
        ("| " + " | ".join(row) + " |").replace("|  |", "| |") for row in (heads, *body)
    ]
    return [first, "|---" * len(heads) + "|", *rest]


def arms(record: str) -> Lines:
    """Return greedy accuracy with its interval, arm by arm."""
    body = []
    for arm, shown in _arms(record):
        k, n, _ = _counts(record, arm, sampled=False)
        accuracy, interval = _share(k, n)
        body.append([shown, f"**{accuracy}**" if "**" in shown else accuracy, interval])
    return table(["", "greedy", "95% interval"], body)


def arms_in_full(record: str) -> Lines:
    """Return greedy accuracy, its interval, unread answers, and sampled accuracy, arm by arm."""
    body = []
    for arm, shown in _arms(record):
        k, n, unread = _counts(record, arm, sampled=False)
        sampled_k, sampled_n, _ = _counts(record, arm, sampled=True)
        body.append([shown, *_share(k, n), str(unread), _share(sampled_k, sampled_n)[0]])
    return table(["", "greedy", "95% interval", "names no option", "sampled"], body)


def differences(record: str) -> Lines:
    """Return paired differences of the trained arms over those before them, as `forge compare`."""
    found = compare_groups(
        grouped([AnswerSource(record, _answers(record))], sampled=False),
        arms=("untrained", "offline", "on_policy"),
    )
    body = []
    for one in found:
        scale, form = (100, "+.1f") if one.metric == "right" else (1, "+.3f")
        low, high = (format(scale * x, form) for x in one.ci95)
        unit = "right, points" if one.metric == "right" else "loss of the right answer, nats"
        body.append(
            [one.b.replace("_", " "), one.a.replace("_", " "), unit,
             format(scale * one.difference, form), f"{low} to {high}", f"{one.p_holm:.2g}"]
        )  # fmt: skip
    return table(["", "over", "", "difference", "95% interval", "p, Holm"], body)


def training(record: str) -> Lines:
    """Return what a run trained: steps, tokens, doc_kl of the first and the last step."""
    body = []
    for arm in ("on_policy", "offline"):
        own = [row for row in records.rows(record, "metrics.jsonl") if row["arm"] == arm]
        if not own:
            continue
        last = fmean(row["kl"] for row in own[-10:])
        tokens, stale = (sum(row[key] for row in own) for key in ("tokens", "stale_tokens"))
        body.append(
            [arm.replace("_", " "), str(len(own)), f"{tokens:,}", str(stale),
             f"{own[0]['kl']:.3f}", f"{last:.3f}"]
        )  # fmt: skip
    heads = ["", "steps", "trained tokens", "stale", "doc_kl, first step", "mean of the last ten"]
    return table(heads, body)


def frontier(record: str) -> Lines:
    """Return accuracy, gain over the first arm, tokens and calls of every strategy."""
    body = []
    kept: dict[str, list[float]] = {}
    for row in records.rows(record, "frontier_answers.jsonl"):
        kept.setdefault(row["arm"], []).append(row["right"])
    for arm in records.whole(record, "frontier.json")["arms"]:
        own = kept[arm["name"]]
        gain = "" if arm["gain"] is None else (
            f"{100 * arm['gain']:+.1f} ({100 * arm['gain_ci95'][0]:.1f} to "
            f"{100 * arm['gain_ci95'][1]:.1f})"
        )  # fmt: skip
        body.append(
            [arm["name"], f"{100 * fmean(own):.1f}%", gain, f"{arm['tokens']:.0f}",
             f"{arm['calls']:.1f}".removesuffix(".0")]
        )  # fmt: skip
    return table(["", "right", "over one sample, 95% interval", "tokens", "calls"], body)


def over_prompt(record: str) -> Lines:
    """Return tokens/s with a cartridge and with as many cached prompt tokens, and their ratios."""
    body = []
    for together, one in results_of(record).items():
        speeds = [f"{one['tokens_per_second'][arm]:.0f}" for arm in ("cartridge", "prompt", "none")]
        ratios = [one[kind]["cartridge/prompt"] for kind in ("ratio", "by_processor_time")]
        body.append(
            [together, *speeds,
             *(f"{r['median']:.2f} ({r['lower_quartile']:.2f} to {r['upper_quartile']:.2f})"
               for r in ratios)]
        )  # fmt: skip
    heads = [
        "requests in flight", "cartridge, tokens/s", "prompt tokens", "neither",
        "cartridge over prompt, by round", "by processor time",
    ]  # fmt: skip
    return table(heads, body)


def beside_transformers(record: str) -> Lines:
    """Return the seconds of each phase of a real model's step, and transformers'."""
    body = [
        [phase, dtype, f"{one['ours']:.1f}", f"{one['transformers']:.1f}",
         f"**{one['times_as_fast']:.2f}**"]
        for dtype, phases in results_of(record).items()
        for phase, one in phases.items()
    ]  # fmt: skip
    return table(["phase", "type", "ours, s", "transformers, s", "times as fast"], body)


TABLES: dict[str, Callable[[str], Lines]] = {
    "arms": arms,
    "arms_in_full": arms_in_full,
    "differences": differences,
    "training": training,
    "frontier": frontier,
    "over_prompt": over_prompt,
    "beside_transformers": beside_transformers,
    "publishes": lambda record: table(*publishes(results_of(record))),
    "simulated": lambda record: table(*simulated(results_of(record))),
    "limits": lambda record: table(*limits(results_of(record))),
    "shared_facts": lambda names: table(*shared_facts(names)),
    "seeds": lambda folder: table(*seeds(folder)),
    "over_reference": lambda sweep: table(*over_reference(sweep)),
    "between": lambda sweep: table(*between(sweep)),
    "collapses": lambda sweep: table(*collapses(sweep)),
    "every_arm": lambda sweep: table(*every_arm(sweep)),
    "primary": lambda sweep: table(*primary(sweep)),
    "secondary": lambda sweep: table(*secondary(sweep)),
    "merging_arms": lambda sweep: table(*merging_arms(sweep)),
    "merging_differences": lambda sweep: table(*merging_differences(sweep)),
    "real_arms": lambda sweep: table(*real_arms(sweep)),
    "real_primary": lambda sweep: table(*real_primary(sweep)),
    "real_secondary": lambda sweep: table(*real_secondary(sweep)),
    "articles": lambda record: table(*articles(record)),
    "right_answers": lambda record: table(*right_answers(record)),
    "trained_to_aggregate": lambda sweep: table(*trained_to_aggregate(sweep)),
}


def made(argument: str) -> Lines:
    """Return the lines of a mark's table: `made("longhealth arms")`."""
    record, _, kind = argument.partition(" ")
    return TABLES[kind](record)


def tables_of(page: Path) -> Iterator[DocTable]:
    """Yield the tables of a page with their marks; the kind "" stands for none."""
    lines = page.read_text(encoding="utf-8").splitlines()
    text = "\n".join(lines)
    at = 0
    while at < len(lines):
        end = at
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        if end > at:
            before = [line for line in lines[max(0, at - 2) : at] if line.strip()]
            found = MARK.fullmatch(before[-1].strip()) if before else None
            kind, argument = (found[1], found[2] or "") if found else ("", "")
            if not kind and WHOLE_PAGE in text:
                kind = "no record"
            yield DocTable(page, at + 1, tuple(lines[at:end]), kind, argument)
        at = max(end, at + 1)


def faults(root: Path = REPOSITORY) -> list[str]:
    """Return every fault of the pages: tables without a mark, and rows that differ."""
    found = []
    for name in PAGES:
        page = root / name
        unrecorded = False
        for one in tables_of(page):
            place = f"{name}:{one.line}"
            if not one.kind and one.has_results:
                found.append(f"{place}: a table without a mark (see benchmarks/results/tables.py)")
            unrecorded |= one.kind == "no record"
            if one.kind == "record":
                found += _differing(place, one.lines, made(one.argument))
        if unrecorded and NOT_KEPT not in page.read_text(encoding="utf-8"):
            found.append(f"{name}: has tables without a record and does not tell its readers")
    return found


def write(root: Path = REPOSITORY) -> list[str]:
    """Write every recorded table anew, and return the pages that changed."""
    changed = []
    for name in PAGES:
        page = root / name
        lines = page.read_text(encoding="utf-8").splitlines()
        for one in reversed(list(tables_of(page))):
            if one.kind == "record":
                lines[one.line - 1 : one.line - 1 + len(one.lines)] = made(one.argument)
        text = "\n".join(lines) + "\n"
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            changed.append(name)
    return changed


def _differing(place: str, shown: Sequence[str], wanted: Sequence[str]) -> list[str]:
    if len(shown) != len(wanted):
        return [f"{place}: {len(shown)} lines, the record gives {len(wanted)}"]
    return [
        f"{place}: row {i} is {a!r}, the record gives {b!r}"
        for i, (a, b) in enumerate(zip(shown, wanted, strict=True))
        if a != b
    ]


def _answers(record: str) -> list[Any]:
    return list(records.rows(record, "answers.jsonl"))


def _arms(record: str) -> list[tuple[str, str]]:
    have = {row["arm"] for row in records.rows(record, "answers.jsonl")}
    return [(arm, shown) for arm, shown in ARM_NAMES.items() if arm in have]


def _counts(record: str, arm: str, *, sampled: bool) -> tuple[int, int, int]:
    """Return how many of an arm's answers are right, how many there are, and how many unread."""
    own = [r for r in _answers(record) if r["arm"] == arm and r["sampled"] == sampled]
    right = sum(row["right"] == 1.0 for row in own)
    return right, len(own), sum(row["answer"] is None for row in own)


def _share(k: int, n: int) -> tuple[str, str]:
    low, high = wilson_interval(k, n)
    return f"{100 * k / n:.1f}%", f"{100 * low:.1f}% to {100 * high:.1f}%"
