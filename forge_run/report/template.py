"""Pages from plain data: a section is a list of blocks, and report.html.j2 turns them to markup.

A block is (kind, content). Every text in it is escaped by the template, for models wrote many.

    heading    a title below the section's
    table      a Section: its title is read aloud, its first column names the rows
    plots      plots side by side
    facts      {name: value}
    list       texts
    talk       (head, [(who speaks, text), ...])
    folded     (summary, blocks)
    verbatim   a text whose lines stay as they are
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

# Compiled when this is imported, which a run does before its end.
PAGE = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
).get_template("report.html.j2")


def render(name: str, header: Sequence[Block], sections: Mapping[str, Sequence[Block]]) -> str:
    """Render a whole page: its name, what stands below it, and each section that has blocks."""
    shown = {title: blocks for title, blocks in sections.items() if blocks}
    return PAGE.render(name=name, header=header, sections=shown, style=STYLE)


def shortened(text: str) -> str:
    """Cut a text to LONGEST characters, and say how many more there are."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]} ... ({len(text) - LONGEST} more characters)"
