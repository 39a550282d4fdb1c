"""Render pages from plain data: a section is a list of blocks for blocks.html.j2.

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

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

STATIC = Path(__file__).parents[1] / "pages" / "static"
_OWN = (STATIC / "app.css").read_text(encoding="utf-8")
PAGE_STYLE = (STATIC / "vendor/uPlot.min.css").read_text(encoding="utf-8") + "\n" + _OWN


def _colours(block: str) -> dict[str, str]:
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", block))


_light, _dark = re.findall(r":root \{(.*?)\}", _OWN, re.DOTALL)[:2]
# name -> (in light mode, in dark mode)
COLOURS = {
    name: (colour, _colours(_dark)[name])
    for name, colour in _colours(_light).items()
    if name in _colours(_dark)
}
LIGHT, DARK = (";".join(f"--{name}:{pair[i]}" for name, pair in COLOURS.items()) for i in (0, 1))
# Of a plot that stands alone.
PLOT_STYLE = (
    f":root{{color-scheme:light dark;{LIGHT}}}\n"
    f"@media(prefers-color-scheme:dark){{:root{{{DARK}}}}}"
)


Block = tuple[str, Any]
Row = dict[str, Any]

LONGEST = 1200  # characters of a rollout's text
TEMPLATES = Path(__file__).parent


def environment(*folders: Path) -> Environment:
    """Return the templates of these folders and of this one."""
    return Environment(
        loader=FileSystemLoader([*folders, TEMPLATES]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )


# Compiled on import, which a run does before its end.
ALONE = environment().get_template("alone.html.j2")


def render(
    name: str,
    header: Sequence[Block],
    sections: Mapping[str, Sequence[Block]],
    *,
    run: str = "",
    script: str = "",
    kept: str = "",
) -> str:
    """Return a page that needs no other file: its name, the header below it, and each section.
    With a `script`, which may read `kept` (JSON without a "<") from the element of that
    id, it shows the pages of a `run` in their place."""
    policy = f"default-src 'none'; style-src {_allowed(PAGE_STYLE)}; base-uri 'none'; "
    policy += "form-action 'none'"
    policy += f"; script-src {_allowed(script)}" if script else ""
    return ALONE.render(
        name=name, header=header, sections=sections, style=PAGE_STYLE, policy=policy,
        run=run, script=script, kept=kept,
    )  # fmt: skip


def _allowed(text: str) -> str:
    """Return what a content policy names an inline script or style by: its hash."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def shortened(text: str) -> str:
    """Return a text cut to LONGEST characters, with the number of characters cut."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]} ... ({len(text) - LONGEST} more characters)"
