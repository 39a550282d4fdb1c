"""Read the colours of the pages from app.css, where they stand once, for plots and for pages that
stand alone."""

from __future__ import annotations

import re
from pathlib import Path

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
