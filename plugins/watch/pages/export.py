"""Write report.html: the pages of forge ui about one run, in one file that asks for nothing.

report.html = results as HTML, readable without scripts
              + the other pages' modules as one script
              + what a server would answer them, as JSON: all of it but the rows of rollouts and
                the cartridges, of which it is a sample and the last checkpoint's
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.watch.pages import cartridges_page, mesh_page, rollouts_page, run_page
from cartridge_forge.plugins.watch.pages.run_view import SOURCES, RunView
from cartridge_forge.plugins.watch.report.page import sections_of
from cartridge_forge.plugins.watch.report.template import STATIC, render
from cartridge_forge.protocols.errors import ForgeError
from cartridge_forge.protocols.files import write_atomically

EXPORTED_PAGES = {
    "run": "Run", "results": "Results", "rollouts": "Rollouts", "cartridges": "Cartridges",
    "mesh": "Mesh",
}  # fmt: skip
MODULES = ("exported", "page", "chart", "rollout", "run", "rollouts", "cartridges", "mesh")
PAGE_ROWS = 25
MOST_EVENTS = 200
SAMPLE_ROWS = 60  # of each source
SAMPLE_TOKENS = 12_000  # of each source: about 60 bytes each

_IMPORT = re.compile(r'^import (\{.*\}) from "/static/(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:function|class|const) (\w+)", re.MULTILINE)
_LISTED = re.compile(r"^export \{ (.*) \};$", re.MULTILINE)

# The script's own part. The browser's history works, since a page is begun anew for each fragment.
START = """
const loaded = {};
const need = (name) => (loaded[name] ??= modules[name]());
const shown = location.hash.slice(1) in pages ? location.hash.slice(1) : "run";
document.getElementById("pages").append(...Object.entries(pages).map(([name, title]) => {
  const link = document.createElement("a");
  link.href = `#${name}`;
  link.textContent = title;
  if (name === shown) link.setAttribute("aria-current", "page");
  return link;
}));
addEventListener("hashchange", () => { if (location.hash.slice(1) in pages) location.reload(); });
if (shown in modules) need(shown);
"""


def write_report(run_path: Path) -> Path:
    """Write `report.html` into the run directory and return its path."""
    view = RunView(run_path.resolve().name, run_path)
    report = sections_of(run_path)
    data = json.dumps(_kept(view), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    html = render(
        report.name, report.header, report.sections, run=view.key, script=script(),
        kept=data.replace("<", "\\u003c"),
    )  # fmt: skip
    write_atomically(view.run.report, html)
    return view.run.report


def script() -> str:
    """Return the modules of the pages as one script: each a function, called when it is first
    needed. uPlot stands before them, with its licence."""
    licence = (STATIC / "vendor/uPlot.LICENSE").read_text(encoding="utf-8")
    plot = (STATIC / "vendor/uPlot.iife.min.js").read_text(encoding="utf-8")
    modules = ",\n".join(f"{name}() {{\n{_module(name)}}}" for name in MODULES)
    pages = json.dumps(EXPORTED_PAGES)
    program = (
        f"(() => {{\nconst pages = {pages};\nconst modules = {{\n{modules}\n}};{START}}})();\n"
    )
    return f"/*\n{licence}*/\n{plot}\n{program}"


def _module(name: str) -> str:
    """Return the body of a function that does what a module does and returns what it exports."""
    source = (STATIC / f"{name}.js").read_text(encoding="utf-8")
    names = _EXPORT.findall(source) + [
        n for one in _LISTED.findall(source) for n in one.split(", ")
    ]
    source = _LISTED.sub("", _IMPORT.sub(r'const \1 = need("\2");', source))
    source = re.sub(r"^export ", "", source, flags=re.MULTILINE)
    return f"{source}return {{ {', '.join(names)} }};\n"


def _kept(view: RunView) -> dict[str, Any]:
    content: dict[str, Any] = {
        "answers": {
            "overview": run_page.overview(view, None), "curves": run_page.curves(view, 0, 0),
            "steps": run_page.steps(view, 0, 0), "events": run_page.happenings(view, MOST_EVENTS),
            "mesh": {**mesh_page.mesh(view, None), "stacks": []}, "cartridges": _cartridges(view),
        },
        "marks": {**view.marks(), "running": False, "outcome": view.outcome()},
        "rollouts": {}, "rollout": {}, "page": PAGE_ROWS,
    }  # fmt: skip
    for source in SOURCES:
        content["rollouts"][source], content["rollout"][source] = _sample(view, source)
    return content


def _cartridges(view: RunView) -> dict[str, Any]:
    try:
        page = cartridges_page.cartridges(view, "")
    except ForgeError:  # damaged; the other pages stand
        return {"checkpoints": [], "cartridges": []}
    return {**page, "checkpoints": [page["shown"]] if page["checkpoints"] else []}


def _sample(view: RunView, source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return rows spread over a source as a list has them, and each of them whole."""
    index = view.index(source)
    row_tokens = index.tokens / len(index) if len(index) else 0.0
    count = (
        SAMPLE_ROWS if not row_tokens else max(1, min(SAMPLE_ROWS, int(SAMPLE_TOKENS / row_tokens)))
    )
    rows = [rollouts_page.listed(view, source, number) for number in index.spread_over(count)]
    listed = {
        "tokens": index.tokens, "choices": index.choices(), "rows": rows, "all": len(index),
    }  # fmt: skip
    numbers = {row["number"] for row in rows}
    return listed, {
        str(number): _whole(view, source, number, numbers) for number in sorted(numbers)
    }


def _whole(view: RunView, source: str, number: int, numbers: set[int]) -> dict[str, Any]:
    page = rollouts_page.details(view, source, number)
    return {**page, "same": [row for row in page["same"] if row["number"] in numbers]}
