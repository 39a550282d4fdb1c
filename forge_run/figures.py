"""Figures as people read them, and the titled table that every plan is made of."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Section:
    """A titled table: `Section("budget", ("", ""), (("prompts a step", "32"),))`."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def markdown_table(section: Section) -> str:
    """A section's rows in Markdown, without its title."""
    lines = (section.columns, ("---",) * len(section.columns), *section.rows)
    return "\n".join(f"| {' | '.join(map(markdown_text, line))} |" for line in lines)


def markdown_text(text: str) -> str:
    """A line that Markdown shows as it is: `"a|b <c>"` -> `"a\\|b &lt;c&gt;"`."""
    return escape(" ".join(text.split()), quote=False).replace("|", "\\|")


def bytes_text(count: float) -> str:
    """Bytes in decimal units, three digits: `234_881_024` -> `"235 MB"`."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def count_text(count: float) -> str:
    """A count, three digits: `117_383_168` -> `"117 M"`."""
    return _scaled(count, ("", "k", "M", "G", "T", "P"))


def seconds_text(seconds: float) -> str:
    """Seconds, two digits: `0.0094` -> `"9.4 ms"`."""
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
