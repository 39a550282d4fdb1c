"""Write tables and pages of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOTE = "<!-- Written by `make reference` from the code: do not edit. -->"


def page(title: str, *parts: str) -> str:
    """Return a page: its title, the note that it is generated, and its parts."""
    return "\n\n".join([f"# {title}", NOTE, *(part.strip() for part in parts if part)]) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of the rows; nothing without rows."""
    lines = ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join(["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *lines])


def cell(text: str) -> str:
    """Return text on one line that cannot end its cell."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Return text as code, also where it has backticks."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"
