"""Draw plots as SVG with matplotlib, and style them alike.

The colours are CSS variables, so that a plot follows its page into dark mode.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from cartridge_forge.plugins.watch.report.template import COLOURS, PLOT_STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Draw = Callable[["Figure"], None]

HUES = tuple(name for name in COLOURS if name.startswith("hue"))
MARKERS = "osD^v<>P"

# matplotlib draws with stand-in colours; `Plot` turns each into the CSS variable of its name.
PAINT = {name: f"#dead{index:02x}" for index, name in enumerate(COLOURS)}
RC: dict[Any, Any] = {
    **{"font.family": "sans-serif", "font.size": 9, "legend.frameon": False},
    **{"axes.spines.top": False, "axes.spines.right": False},
    **{"axes.grid": True, "axes.axisbelow": True, "grid.linewidth": 0.5},
    **dict.fromkeys(("text.color", "axes.labelcolor"), PAINT["ink"]),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), PAINT["soft"]),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), PAINT["line"]),
    "text.parse_math": False,  # names may contain a dollar sign
    "svg.fonttype": "none",  # text stays text: small, selectable, read aloud
}


@dataclass(frozen=True)
class Plot:
    """Describe a plot of a page, `height` inches high; `note` is also its text for screen readers.
    `file` is the name of an SVG to be written beside the page, empty for none."""

    title: str
    note: str
    draw: Draw
    height: float = 3.0
    file: str = ""

    @property
    def svg(self) -> str:
        """Return the plot for its page."""
        return self._svg(f"{self.title}. {self.note}")

    @property
    def alone(self) -> str:
        """Return an SVG that stands alone, in light or dark colours as the viewer prefers."""
        return self._svg(self.title, f"<style>{PLOT_STYLE}</style>") + "\n"

    def _svg(self, label: str, style: str = "") -> str:
        """Return SVG without prolog, metadata, matplotlib's style or a fixed size."""
        import matplotlib as mpl  # half a second, and only reports need it
        from matplotlib.figure import Figure
        from matplotlib.style import context

        # The salt makes ids deterministic, and unique among the figures of a page.
        with context("default"), mpl.rc_context({**RC, "svg.hashsalt": self.title}):
            # Near a phone's width, so that text keeps about its size.
            figure = Figure(figsize=(4.8, self.height), layout="constrained")
            self.draw(figure)
            out = io.StringIO()
            figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        match = re.search(r'<svg[^>]*(viewBox="[^"]*")[^>]*>(.*)', out.getvalue().strip(), re.S)
        assert match
        box, inside = match.groups()
        inside = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", inside, flags=re.S)
        inside = re.sub(r'<g id="[^"]*"', "<g", inside)  # ids like axes_1 would repeat
        # A page's policy allows no style on an element; SVG has an attribute for each property.
        inside = re.sub(r' style="([^"]*)"', _as_attributes, inside)
        for name, colour in PAINT.items():
            inside = inside.replace(colour, f"var(--{name})")
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'role="img" aria-label="{escape(label)}" {box}>{style}{inside}'
        )


def _as_attributes(style: re.Match[str]) -> str:
    """Return ' fill="none" stroke-width="0.5"' for 'fill: none; stroke-width: 0.5'."""
    pairs = (part.split(":", 1) for part in style[1].split(";") if part.strip())
    return "".join(f' {name.strip()}="{value.strip()}"' for name, value in pairs)


def hue(index: int) -> str:
    """Return the colour of an index, in turn."""
    return PAINT[HUES[index % len(HUES)]]


def as_percent(axis: Axis) -> None:
    """Label an axis of shares in percent."""
    axis.set_major_formatter(lambda share, _: f"{share:.0%}")


def share_axes(figure: Figure, **style: Any) -> Axes:
    """Add axes with shares on the y axis; `style` is passed to matplotlib."""
    axes = figure.add_subplot(**style)
    as_percent(axes.yaxis)
    return axes


def legend(axes: Axes, ncols: int) -> None:
    """Put a small legend above the plot."""
    axes.legend(fontsize=7, ncols=ncols, loc="lower center", bbox_to_anchor=(0.5, 1))


def error_bars(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float],
    intervals: Sequence[Sequence[float]],
    **style: Any,
) -> None:
    """Draw points with their intervals (low, high) as bars; `style` is passed to matplotlib."""
    below = [max(0.0, v - low) for v, (low, _) in zip(y, intervals, strict=True)]
    above = [max(0.0, high - v) for v, (_, high) in zip(y, intervals, strict=True)]
    axes.errorbar(x, y, yerr=[below, above], **style)
