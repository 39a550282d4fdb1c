"""Compare arms and runs question by question: `forge compare RUN RUN...`.

RUNs' answers.jsonl, or files of such rows -> pairs of arms, or of runs -> differences with
intervals (training.evaluation.comparison)
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from cartridge_forge.plugins.evaluate.comparison import (
    RESAMPLES,
    SEED,
    AnswerSource,
    Comparison,
    RunGroup,
    compare_groups,
    grouped,
    remarks,
)
from cartridge_forge.plugins.statistics.formatting import TableSection, facts, lines
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import iter_rows
from cartridge_forge.protocols.records.answers import AnswerRow
from cartridge_forge.protocols.spec.loading import load_resolved
from cartridge_forge.services.run_directory import EVAL_ANSWERS, RunDirectory

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
