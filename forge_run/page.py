"""What the report's sections are made of: the page, its tables, and plots as inline SVG.

Every text that is handed in is escaped here or marked as markup by its name: `body`, `cells` that
are text, `draw` that paints. The plots' colours are CSS variables, so they follow the page into
dark mode.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from statistics import fmean
from typing import TYPE_CHECKING, Any

from protocols.records import ARMS, PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]

LONGEST = 1200  # characters of a rollout's text
HUES = ("hue1", "hue2", "hue3", "hue4", "hue5", "hue6")  # channels and kinds of error, in turn

# matplotlib draws with stand-in colours; `_svg` turns each into the CSS variable of its name.
VARIABLES = ("ink", "soft", "line", *ARMS, *PHASES, *HUES)
PAINT = {name: f"#dead{index:02x}" for index, name in enumerate(VARIABLES)}
RC: dict[Any, Any] = {
    **{"font.family": "sans-serif", "font.size": 9, "legend.frameon": False},
    **{"axes.spines.top": False, "axes.spines.right": False},
    **{"axes.grid": True, "axes.axisbelow": True, "grid.linewidth": 0.5},
    **dict.fromkeys(("text.color", "axes.labelcolor"), PAINT["ink"]),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), PAINT["soft"]),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), PAINT["line"]),
    "text.parse_math": False,  # names are not ours: a dollar sign is one
    "svg.fonttype": "none",  # text stays text: small, selectable, read aloud
}
CSS = """
:root{color-scheme:light dark;--page:#faf9f6;--ink:#1d2126;--soft:#5a636e;--line:#dcd8cf;
--none:#8a7f78;--document:#3b5bab;--untrained:#866a9b;--offline:#b45309;--on_policy:#0f766e;
--rollout:#2f4a63;--score:#5b7f9f;--train:#8fb2cc;--publish:#bcd0dd;--orchestration:#c2410c}
@media(prefers-color-scheme:dark){:root{--page:#15181b;--ink:#e6e3dd;--soft:#a0a8b1;--line:#343a40;
--none:#9c948e;--document:#8fabf0;--untrained:#bba2d0;--offline:#f0a35e;--on_policy:#4fc3b4;
--rollout:#a9c6df;--score:#7199bd;--train:#4a7093;--publish:#365570;--orchestration:#f2895c}}
*{box-sizing:border-box}
body{margin:0 auto;padding:2rem 1rem 4rem;max-width:64rem;background:var(--page);color:var(--ink);
font:1rem/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;line-height:1.25;margin:0;overflow-wrap:anywhere}p{margin:.4rem 0}
h2{font-size:1.2rem;margin:2.5rem 0 .5rem}h3{font-size:1rem;margin:.5rem 0}
.soft,figcaption,dt{color:var(--soft);font-size:.9rem}.status{font-weight:600}
.finished{color:var(--on_policy)}.stopped,.unfinished{color:var(--offline)}
.failed{color:var(--orchestration)}
.error{border-left:3px solid var(--orchestration);padding:.2rem .8rem;overflow-wrap:anywhere}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.35rem .6rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{font-weight:500}th:first-child{text-align:left;padding-left:0}thead th{color:var(--soft)}
tr.ours>*{font-weight:700}
.plots{display:grid;gap:2rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr))}
figure{margin:0;min-width:0}figcaption{margin-top:.4rem}
svg{display:block;width:100%;height:auto;stroke-linejoin:round;stroke-linecap:butt}
svg text{font-family:system-ui,sans-serif!important}
dl{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));margin:.5rem 0}
dd{margin:0;font-size:1.2rem;font-variant-numeric:tabular-nums}
article{border-top:1px solid var(--line);padding:.6rem 0}summary{cursor:pointer}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.3rem 0;font:.875rem/1.5 monospace}
"""
# For runs with episodes, after CSS.
EPISODE_CSS = """
:root{--hue1:#3b5bab;--hue2:#0f766e;--hue3:#b45309;--hue4:#866a9b;--hue5:#be3455;--hue6:#5f7a1f}
@media(prefers-color-scheme:dark){:root{--hue1:#8fabf0;--hue2:#4fc3b4;--hue3:#f0a35e;
--hue4:#bba2d0;--hue5:#f08aa0;--hue6:#b3cc6a}}
.wide figure{grid-column:1/-1}
dl.talk{grid-template-columns:max-content 1fr;gap:.2rem .8rem;margin:.3rem 0}
.talk dd{font-size:1rem;min-width:0}.talk pre{margin:0}
"""


def page(name: str, body: str, css: str = "") -> str:
    """The whole document; `body` is markup, `css` comes after the page's own."""
    # The policy forbids scripts and requests even if an escape were ever missed.
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(name)}</title>
<style>{CSS}{css}</style>
</head>
<body><main>
{body}
</main></body>
</html>
"""


def section(title: str, body: str) -> str:
    """A part of the page; `body` is markup."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>"


def figure(title: str, note: str, draw: Callable[[Figure], None], height: float = 3.0) -> str:
    """A plot `height` inches high, with its title and a note that also reads it aloud."""
    label = escape(f"{title}. {note}")
    return f"""<figure>
<h3>{escape(title)}</h3>
{_svg(title, draw, height).replace("<svg", f'<svg role="img" aria-label="{label}"', 1)}
<figcaption>{escape(note)}</figcaption>
</figure>
"""


def drawing(title: str, draw: Callable[[Figure], None], height: float = 3.0) -> str:
    """A plot as an SVG file of its own, in light or dark colours as who shows it likes."""
    colours = "".join(re.findall(r":root\{--[^}]*\}|@media[^}]*\}\}", CSS + EPISODE_CSS))
    colours += "".join(re.findall(r":root\{color-scheme:[^}]*\}", CSS))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}"'
    svg = re.sub(r' xmlns="[^"]*"', "", _svg(title, draw, height), count=1)
    svg = svg.replace("<svg", head, 1)
    return re.sub(r"(<svg[^>]*>)", rf"\1<style>{colours}</style>", svg, count=1) + "\n"


def _svg(salt: str, draw: Callable[[Figure], None], height: float) -> str:
    """A drawing as inline SVG: no prolog, no metadata, no style of its own, no fixed size."""
    import matplotlib as mpl  # half a second, and only reports need it
    from matplotlib.figure import Figure
    from matplotlib.style import context

    # The salt makes ids a function of the content, and parts the figures of one page.
    with context("default"), mpl.rc_context({**RC, "svg.hashsalt": salt}):
        # Near a phone's width, so that text is never scaled far from its size.
        drawing = Figure(figsize=(4.8, height), layout="constrained")
        draw(drawing)
        out = io.StringIO()
        drawing.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # ids like axes_1 would repeat from plot to plot
    for name, colour in PAINT.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg


def curve(
    axes: Axes, label: str, x: Sequence[int], y: Sequence[float], window: int, **style: Any
) -> None:
    """The numbers themselves, and where `window` is some of them, their trailing mean in front.

    `style` is matplotlib's; its colour is one of PAINT.
    """
    if window < 2:
        axes.plot(x, y, label=label, marker="o", markersize=3, **style)
        return
    axes.plot(x, y, color=style["color"], alpha=0.3, linewidth=0.7)
    smooth = trailing(y, window)
    axes.plot(x, smooth, label=f"{label}, mean of {window}", linewidth=1.6, **style)


def trailing(y: Sequence[float], window: int) -> list[float]:
    """`trailing([1, 3, 5], 2) == [1, 2, 4]`."""
    return [fmean(y[max(0, i + 1 - window) : i + 1]) for i in range(len(y))]


def table(name: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts, whose first column names the row."""
    ths = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    trs = []
    for first, *cells in rows:
        tds = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        trs.append(f'<tr><th scope="row">{escape(first)}</th>{tds}</tr>\n')
    return f"""<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table>
<thead><tr>{ths}</tr></thead>
<tbody>
{"".join(trs)}</tbody>
</table></div>"""


def shortened(text: str) -> str:
    """At most LONGEST characters of a text, and how many more there are."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]} ... ({len(text) - LONGEST} more characters)"
