"""Write the table of a run beside the published figures, as Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.statistics.formatting import TableSection, markdown_table
from cartridge_forge.plugins.statistics.intervals import wilson_interval
from cartridge_forge.protocols.files import write_atomically

SCHEMA = 1
JSON, MARKDOWN = "table.json", "table.md"


@dataclass(frozen=True)
class TableRow:
    """Hold one row: an accuracy with its 95% interval and the n questions, both None where the
    source does not give them."""

    name: str
    accuracy: float
    ci95: tuple[float, float] | None
    n: int | None
    source: str


def published_row(name: str, right: int, n: int, source: str) -> TableRow:
    """Return a published share of n questions with Wilson's interval."""
    return TableRow(name, right / n, wilson_interval(right, n), n, source)


SEED = "seed specification: 40 questions about two patients"


def published_rows() -> list[TableRow]:
    """Return the figures that a run is held beside. Those of the seed specification are shares of
    40 questions: 12 and 19 of them."""
    return [
        published_row("published: no cartridge", 12, 40, SEED),
        published_row("published: cartridge trained offline", 19, 40, SEED),
        TableRow(
            "published: cartridge from the first tokens of the document, trained offline",
            0.553, None, None, "the paper's LongHealth; no interval is given",
        ),
    ]  # fmt: skip


LABELS = {
    "none": "no document",
    "untrained": "the document's first tokens as a cartridge, untrained",
    "on_policy": "cartridge trained on policy",
    "hybrid": "cartridge trained on policy after a warm start",
    "document": "the whole document in the prompt",
}


def measured_rows(arms: Mapping[str, Mapping[str, Any]], source: str) -> list[TableRow]:
    """Return a row for each measured arm, in the order of LABELS. `arms` has `accuracy`, `ci95` and
    `n` by arm, as results.json and eval.json have them."""
    return [
        TableRow(label, arms[arm]["accuracy"], tuple(arms[arm]["ci95"]), arms[arm]["n"], source)
        for arm, label in LABELS.items()
        if arm in arms and arms[arm]["accuracy"] is not None
    ]


def write_table(
    folder: Path, rows: Sequence[TableRow], facts: Mapping[str, Any], notes: Iterable[str]
) -> str:
    """Write table.json and table.md in a folder, and return the Markdown. `facts` are what was
    planned, trained and spent; `spent_dollars` and `dollars` are among them."""
    lines = [*notes]
    record = {
        "schema": SCHEMA, "rows": [asdict(row) for row in rows], **facts, "notes": lines,
    }  # fmt: skip
    table = TableSection(
        "", ("", "accuracy", "95%", "questions", "from"),
        tuple(
            (
                row.name, f"{row.accuracy:.1%}",
                "not given" if row.ci95 is None else f"{row.ci95[0]:.1%} to {row.ci95[1]:.1%}",
                "not given" if row.n is None else str(row.n), row.source,
            )
            for row in rows
        ),
    )  # fmt: skip
    spent = f"${facts['spent_dollars']:.2f} of ${facts['dollars']:.2f} spent"
    text = f"{markdown_table(table)}\n\n{spent}, {facts['spent_seconds'] / 3600:.2f} hours at "
    text += f"${facts['price']:g}.\n"
    text += "".join(f"\n- {line}" for line in lines) + "\n"
    write_atomically(folder / JSON, json.dumps(record, indent=1, allow_nan=False) + "\n")
    write_atomically(folder / MARKDOWN, text)
    return text
