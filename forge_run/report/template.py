"""Render pages from plain data: a section is a list of blocks for report.html.j2.

A block is (kind, content). The template escapes every text, because models wrote many of them.

    heading    a title below the section's
    table      a TableSection: its title is for screen readers, its first column names the rows
    plots      plots side by side
    facts      {name: value}
    list       texts
    talk       (head, [(speaker, text), ...])
    folded     (summary, blocks)
    verbatim   a text whose line breaks are kept
    any other  a paragraph, whose class in CSS is the kind: text, soft, error, "status failed"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from forge_run.report.plots import STYLE

Block = tuple[str, Any]
Row = dict[str, Any]

LONGEST = 1200  # characters of a rollout's text

# Compiled on import, which a run does before its end.
PAGE = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
).get_template("report.html.j2")


def render(name: str, header: Sequence[Block], sections: Mapping[str, Sequence[Block]]) -> str:
    """Return a whole page: its name, the header below it, and each section that has blocks."""
    shown = {title: blocks for title, blocks in sections.items() if blocks}
    return PAGE.render(name=name, header=header, sections=shown, style=STYLE)


def shortened(text: str) -> str:
    """Return a text cut to LONGEST characters, with the number of characters cut."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]} ... ({len(text) - LONGEST} more characters)"
