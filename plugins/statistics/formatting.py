"""Format numbers, and render the titled tables that every command prints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape

Rows = tuple[tuple[str, ...], ...]


MOST_STYLED = 1000


@dataclass(frozen=True)
class TableSection:
    """Hold a titled table: `TableSection("budget", ("", ""), (("prompts a step", "32"),))`."""

    title: str
    columns: tuple[str, ...]
    rows: Rows


def facts(title: str, rows: Iterable[tuple[str, str]]) -> TableSection:
    """Return a section of names and values, without column heads."""
    return TableSection(title, ("", ""), tuple(rows))


def lines(title: str, texts: Iterable[str]) -> TableSection:
    """Return a section of plain lines."""
    return TableSection(title, ("",), tuple((text,) for text in texts))


def render(sections: Sequence[TableSection], *, terminal: bool) -> str:
    """Return aligned text, or with `terminal` rich's tables at the terminal's width. Where a table
    has very many rows all are text there too: rich takes milliseconds a row."""
    if not terminal or any(len(section.rows) > MOST_STYLED for section in sections):
        return "\n\n".join(map(_plain, sections)) + "\n"
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(force_terminal=True)
    with console.capture() as capture:
        for section in sections:
            table = Table(
                *section.columns,
                title=section.title,
                title_justify="left",
                show_header=any(section.columns),
                title_style="bold",
            )
            for row in section.rows:
                table.add_row(*map(Text, row))  # Text, not markup: "arms[2]" is literal
            console.print(table)
    return capture.get()


def as_json(sections: Sequence[TableSection]) -> str:
    """Return the sections as JSON: `[{"title", "columns", "rows"}, ...]`."""
    return json.dumps([asdict(section) for section in sections], indent=1) + "\n"


def markdown_table(section: TableSection) -> str:
    """Return a section's rows in Markdown, without its title."""
    lines = (section.columns, ("---",) * len(section.columns), *section.rows)
    return "\n".join(f"| {' | '.join(map(markdown_text, line))} |" for line in lines)


def markdown_text(text: str) -> str:
    """Return a line escaped for Markdown: `"a|b <c>"` -> `"a\\|b &lt;c&gt;"`."""
    return escape(" ".join(text.split()), quote=False).replace("|", "\\|")


def bytes_text(count: float) -> str:
    """Return bytes in decimal units, three digits: `234_881_024` -> `"235 MB"`."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def count_text(count: float) -> str:
    """Return a count, three digits: `117_383_168` -> `"117 M"`."""
    return _scaled(count, ("", "k", "M", "G", "T", "P"))


def seconds_text(seconds: float) -> str:
    """Return seconds, two digits: `0.0094` -> `"9.4 ms"`."""
    value, unit = seconds, "s"
    for smaller in ("ms", "us"):
        if value < 0.995:
            value, unit = value * 1000, smaller
    return f"{value:.2g} {unit}" if value < 99.5 else f"{value:,.0f} {unit}"


def _scaled(count: float, units: tuple[str, ...]) -> str:
    step = 0
    while count >= 999.5 and step < len(units) - 1:
        count, step = count / 1000, step + 1
    return f"{count:.3g} {units[step]}".rstrip()


def _plain(section: TableSection) -> str:
    table = [section.columns, *section.rows] if any(section.columns) else list(section.rows)
    widths = [max(len(row[i]) for row in table) for i in range(len(section.columns))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in table]
    return "\n".join([section.title, *(f"  {line}".rstrip() for line in lines)])
