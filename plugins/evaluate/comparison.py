"""Compare arms and runs question by question, from their answers.

sources   the answers of each run, and its settings
groups    runs of the same settings over other questions are pooled; others are compared
pairs     of one group: every two arms; of several groups: the same arm of every two
tests     paired differences over a bootstrap of documents and facts, adjusted by Holm

This module reads no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from statistics import fmean
from typing import Any

from cartridge_forge.plugins.statistics.intervals import (
    ClusterResamples,
    holm,
    paired_difference,
    resamples,
)
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.records.answers import AnswerRow, clusters, pairing_key
from cartridge_forge.protocols.records.run_files import ARMS

METRICS = ("right", "nll", "reward", "accepted", "own_kl", "precision")
UNTRAINED = ("none", "document", "truncated", "untrained")  # equal in runs over the same data
RESAMPLES = 4000
SEED = 0
FEW = 10  # documents: intervals over fewer say little about others

Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class AnswerSource:
    """Hold the answers of one run, its name, and the settings that decide which runs are pooled."""

    name: str
    rows: Sequence[AnswerRow]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class RunGroup:
    """Hold runs of the same settings over different questions; `arms` has each arm's answers."""

    names: list[str]
    settings: Mapping[str, Any]
    arms: dict[str, dict[Key, AnswerRow]]

    @property
    def label(self) -> str:
        return "+".join(self.names)


@dataclass(frozen=True)
class Comparison:
    """Hold the paired difference of `b` over `a` in one metric, over `n` common questions.

    `of_a` and `of_b` are how many questions each answered. `units` counts the `resampled`: facts
    where there is one document. `p_holm` is adjusted for all comparisons made together.
    """

    metric: str
    a: str
    b: str
    n: int
    of_a: int
    of_b: int
    documents: int
    resampled: str
    units: int
    mean_a: float
    mean_b: float
    difference: float
    ci95: tuple[float, float]
    p: float
    p_holm: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def grouped(sources: Sequence[AnswerSource], *, sampled: bool) -> list[RunGroup]:
    """Return the groups in the order of their first runs.

    A run joins the first group of its settings with which it shares no question. Of each arm the
    greedy answers are taken, or with `sampled` the sampled ones; the others where it has none.
    """
    groups: list[RunGroup] = []
    for source in sources:
        arms: dict[str, dict[Key, AnswerRow]] = {}
        for name in dict.fromkeys(row["arm"] for row in source.rows):
            arm_rows = [row for row in source.rows if row["arm"] == name]
            wanted = [row for row in arm_rows if row["sampled"] == sampled] or arm_rows
            arms[name] = {pairing_key(row): row for row in wanted}
        keys = set().union(*arms.values())
        for group in groups:
            keys_in_group = set().union(*group.arms.values())
            if group.settings == source.settings and not keys & keys_in_group:
                group.names.append(source.name)
                for name, rows in arms.items():
                    group.arms.setdefault(name, {}).update(rows)
                break
        else:
            groups.append(RunGroup([source.name], source.settings, arms))
    return groups


def compare_groups(
    groups: Sequence[RunGroup],
    *,
    arms: Sequence[str] = (),
    metrics: Sequence[str] = (),
    count: int = RESAMPLES,
    seed: int = SEED,
) -> list[Comparison]:
    """Return every comparison, with p-values adjusted for all of them.

    Raises DataError for an unknown arm or metric, for groups without a common question, and where
    nothing is left to compare.
    """
    have = ordered({name for group in groups for name in group.arms})
    for name in arms:
        if name not in have:
            raise DataError(f"no run has answers of an arm {name}; --arm is of {', '.join(have)}")
    for name in metrics:
        if name not in METRICS:
            raise DataError(f"--metric must be of {', '.join(METRICS)}: got {name}")
    comparisons: list[Comparison] = []
    cache: dict[tuple[tuple[str, ...], tuple[str, ...]], ClusterResamples] = {}
    for (name_a, a), (name_b, b) in _pairs(groups, arms or have, named=bool(arms)):
        common = [key for key in a if key in b]
        if not common:
            raise DataError(
                f"{name_a} and {name_b} answered different questions: none has the same document, "
                "id and content; compare runs over the same data"
            )
        for metric in metrics or METRICS:
            one = _compared((name_a, a), (name_b, b), common, metric, cache, count, seed)
            if one is not None:
                comparisons.append(one)
    if not comparisons:
        raise DataError(
            "nothing to compare: it takes two arms of a run, or an arm of two runs, with "
            f"{' or '.join(metrics or METRICS)} of the same questions; arms: {', '.join(have)}"
        )
    adjusted = holm([one.p for one in comparisons])
    return [
        Comparison(**{**vars(one), "p_holm": p})
        for one, p in zip(comparisons, adjusted, strict=True)
    ]


def remarks(comparisons: Sequence[Comparison]) -> list[str]:
    """Return what a reader must know beside the numbers."""
    lines = []
    fewest, most = min(c.documents for c in comparisons), max(c.documents for c in comparisons)
    if fewest == 1:
        lines.append("one document: the intervals speak of this document alone, over its facts")
    elif fewest < FEW:
        lines.append(f"{fewest} documents: so few tell little of others")
    if most != fewest:
        lines.append(f"the comparisons are over {fewest} to {most} documents")
    if any(c.n < max(c.of_a, c.of_b) for c in comparisons):
        lines.append("some questions were answered by one side alone: they are left out")
    return lines


def ordered(names: set[str]) -> list[str]:
    """Return arms in the order they are shown in; unknown ones last, by name."""
    order = {name: i for i, name in enumerate(ARMS)}
    return sorted(names, key=lambda name: (order.get(name, len(ARMS)), name))


Side = tuple[str, dict[Key, AnswerRow]]


def _pairs(
    groups: Sequence[RunGroup], arms: Sequence[str], *, named: bool
) -> Iterator[tuple[Side, Side]]:
    if len(groups) == 1:
        (group,) = groups
        for a, b in combinations([name for name in arms if name in group.arms], 2):
            yield (a, group.arms[a]), (b, group.arms[b])
        return
    for one, other in combinations(groups, 2):
        for arm in arms:
            if arm in one.arms and arm in other.arms and (named or arm not in UNTRAINED):
                yield (
                    (f"{arm} of {one.label}", one.arms[arm]),
                    (f"{arm} of {other.label}", other.arms[arm]),
                )


def _compared(
    side_a: Side,
    side_b: Side,
    keys: Sequence[Key],
    metric: str,
    cache: dict[tuple[tuple[str, ...], tuple[str, ...]], ClusterResamples],
    count: int,
    seed: int,
) -> Comparison | None:
    """Return one comparison over the questions of which both have the metric; None without any. The
    loss is that of right answers: held-out prompts of self-study count only where nothing else is.

    Raises DataError where these are about a single fact, which has no interval.
    """
    (name_a, a), (name_b, b) = side_a, side_b
    if metric == "nll" and any(row["right"] is not None for row in a.values()):
        a, b = _judged(a), _judged(b)
        keys = [key for key in keys if key in a and key in b]
    values = [
        (key, x, y)
        for key in keys
        if (x := _value(a[key], metric)) is not None and (y := _value(b[key], metric)) is not None
    ]
    if not values:
        return None
    rows = [a[key] for key, _, _ in values]
    documents, facts = clusters(rows)
    drawn = cache.get(strata := (tuple(documents), tuple(facts)))
    if drawn is None:
        drawn = cache[strata] = resamples(documents, facts, count, seed)
    if drawn.units < 2:
        raise DataError(
            f"{name_a} and {name_b} share questions about one fact only, which has no interval; "
            "ask more questions"
        )
    first, second = [x for _, x, _ in values], [y for _, _, y in values]
    estimate = paired_difference(first, second, drawn)
    several = len(set(documents))
    return Comparison(
        metric=metric, a=name_a, b=name_b, n=len(values), of_a=len(a), of_b=len(b),
        documents=several, resampled="documents" if several > 1 else "facts", units=drawn.units,
        mean_a=fmean(first), mean_b=fmean(second), difference=estimate.mean, ci95=estimate.ci95,
        p=estimate.p,
    )  # fmt: skip


def _judged(answers: Mapping[Key, AnswerRow]) -> dict[Key, AnswerRow]:
    return {key: row for key, row in answers.items() if row["right"] is not None}


def _value(row: Mapping[str, Any], metric: str) -> float | None:
    value: float | None = row.get(metric)  # rows of texts alone have the last three
    return value
