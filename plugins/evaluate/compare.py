"""Compare arms and runs question by question: `forge compare RUN RUN...`.

sources   the answers of each run, and its settings
groups    runs of the same settings over other questions are pooled; others are compared
pairs     of one group: every two arms; of several groups: the same arm of every two
tests     paired differences over a bootstrap of documents and facts, adjusted by Holm
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from cartridge_forge.plugins.spec_files.loading import load_resolved
from cartridge_forge.plugins.statistics.formatting import TableSection, facts, lines
from cartridge_forge.plugins.statistics.gold import clusters, pairing_key
from cartridge_forge.plugins.statistics.intervals import (
    ANY,
    SHARE_DIFFERENCE,
    ClusterResamples,
    holm,
    paired_difference,
    resamples,
)
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import iter_rows
from cartridge_forge.protocols.records.answers import AnswerRow
from cartridge_forge.protocols.records.run_files import ARMS
from cartridge_forge.services.run_directory import EVAL_ANSWERS, RunDirectory

METRICS = ("right", "nll", "reward", "accepted", "own_kl", "precision")
SHARES = ("right", "accepted", "precision")  # of those, the ones that lie in 0..1
UNTRAINED = (
    "none",
    "document",
    "truncated",
    "retrieved",
    "untrained",
)  # equal in runs over the same data
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
    estimate = paired_difference(
        first, second, drawn, SHARE_DIFFERENCE if metric in SHARES else ANY
    )
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


HEADS = (
    "metric", "arm", "over", "questions", "documents", "", "over", "difference", "95%", "p", "Holm"
)  # fmt: skip

# Beside `data`: what changes no answer, or only draws another sample of runs.
POOLED_OVER = ("train.seed", "evaluate.arms", "evaluate.probe_every", "evaluate.probe_questions")


def command(
    runs: Sequence[Path],
    *,
    arms: Sequence[str],
    metrics: Sequence[str],
    sampled: bool,
    as_json: bool,
) -> tuple[TableSection, ...] | int:
    """Return the tables of `forge compare`, or print them as JSON. Raises ForgeError."""
    groups = grouped([read_source(path) for path in runs], sampled=sampled)
    comparisons = compare_groups(groups, arms=arms, metrics=metrics)
    if as_json:
        record = {
            "resamples": RESAMPLES, "seed": SEED,
            "groups": [{"runs": g.names, "settings": own_settings(g, groups)} for g in groups],
            "comparisons": [one.as_dict() for one in comparisons], "notes": remarks(comparisons),
        }  # fmt: skip
        sys.stdout.write(json.dumps(record, indent=1, allow_nan=False) + "\n")
        return 0
    return tables(groups, comparisons)


def tables(
    groups: Sequence[RunGroup], comparisons: Sequence[Comparison]
) -> tuple[TableSection, ...]:
    """Return the runs, the comparisons and the notes as tables."""
    title = (
        f"{len(comparisons)} paired comparisons; 95% intervals by {RESAMPLES:,} resamples of "
        "documents and their facts"
    )
    named = [
        (g.label, ", ".join(f"{k} {v}" for k, v in own_settings(g, groups).items())) for g in groups
    ]
    notes = [
        *remarks(comparisons),
        "right in percentage points, nll in nats a token (less is better)",
    ]
    return (
        facts("runs, and settings in which they differ", named),
        TableSection(title, HEADS, tuple(map(cells, comparisons))),
        lines("notes", notes),
    )


def cells(one: Comparison) -> tuple[str, ...]:
    """Return a row of the table, as texts."""
    scale, form = (100.0, ".1f") if one.metric == "right" else (1.0, ".3f")
    low, high = (format(scale * x, "+" + form) for x in one.ci95)
    return (
        one.metric, one.b, one.a, str(one.n), str(one.documents),
        format(scale * one.mean_b, form), format(scale * one.mean_a, form),
        format(scale * one.difference, "+" + form), f"{low} to {high}",
        f"{one.p:.2g}", f"{one.p_holm:.2g}",
    )  # fmt: skip


def read_source(path: Path) -> AnswerSource:
    """Return the answers of a run directory, of a folder that `forge eval` wrote, or of a file of
    such rows (.jsonl or .jsonl.gz). Raises DataError where there are none."""
    directory = RunDirectory(path.resolve())
    if path.is_dir():
        files = (directory.answers, directory.path / EVAL_ANSWERS)
        file = next((f for f in files if f.is_file()), None)
        if file is None:
            raise DataError(
                f"{path} has no answers.jsonl: name a run that has measured an arm, such as "
                "runs/longhealth/latest; runs of earlier versions kept no answers"
            )
    elif path.is_file():
        file = path
    else:
        raise DataError(f"{path} is no run directory and no file of answers")
    rows = [cast(AnswerRow, row) for row in _rows(file)]
    lacking = [key for key in sorted(AnswerRow.__required_keys__) if rows and key not in rows[0]]
    if not rows or lacking:
        what = f"rows without {', '.join(lacking)}" if lacking else "no row"
        raise DataError(f"{file} has {what}: give the answers.jsonl of a run")
    settings = _settings(directory) if path.is_dir() and directory.spec.is_file() else {}
    name = directory.id if path.is_dir() else f"{directory.path.parent.name}/{directory.id}"
    return AnswerSource(name, rows, settings)


def own_settings(group: RunGroup, groups: Sequence[RunGroup]) -> dict[str, Any]:
    """Return the settings in which a group differs from any other."""
    return {
        key: value
        for key, value in group.settings.items()
        if any(other.settings.get(key) != value for other in groups)
    }


def _rows(file: Path) -> Iterator[Mapping[str, Any]]:
    if file.suffix != ".gz":
        yield from iter_rows(file)
        return
    with gzip.open(file, "rt", encoding="utf-8") as text:
        yield from map(json.loads, text)


def _settings(directory: RunDirectory) -> dict[str, Any]:
    """Return the learning settings by dotted key, without those in which pooled runs may differ."""
    learn = load_resolved(directory.spec).learn.model_dump(mode="json", exclude={"data"})
    return {key: value for key, value in flat_settings(learn) if key not in POOLED_OVER}


def flat_settings(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting of nested sections with its dotted key."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat_settings(inner, f"{path}.{key}" if path else key)
    else:
        yield path, value
