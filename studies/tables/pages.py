"""Compare the tables of README.md, docs/ and studies/ with the archives, and write them anew.

A table stands below a mark:

    <!-- record: channels over_reference shift -->  made by studies.tables from studies/channels
    <!-- no record -->                              published before raw results were kept
    <!-- settings -->                               numbers that are no results

A page may have one mark for all its tables: `<!-- no record: whole page -->`. On the pages of
results, a table of three decimals or percentages without a mark is a fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cartridge_forge.protocols.files import REPOSITORY
from studies.tables.recorded import table_lines

# Pages of results: none of their tables is without a mark.
RESULTS = (
    "README.md", "docs/corpus.md", "docs/how-to/make.md", "docs/how-to/vllm.md", "docs/real.md",
    "docs/security.md",
    *(f"docs/explanation/{name}.md" for name in (
        "cartridges", "channels", "compression", "on_policy", "performance", "results", "rsa",
        "scaling", "test_time_compute", "verified_serving",
    )),
    *(f"studies/{name}/README.md" for name in (
        "aggregation", "ahead", "channels", "lengths", "on_policy", "real", "verified",
    )),
)  # fmt: skip
FIGURE = re.compile(r"\d(?:\.\d|%)")
MARK = re.compile(r"<!-- (record|no record|settings)(?:: ?(.*?))? -->")
WHOLE_PAGE = "<!-- no record: whole page -->"
NOT_KEPT = "before raw results were kept"  # what a reader is told where there is no record


@dataclass(frozen=True)
class DocTable:
    """Hold a table of a page: its first line's number from 1, its lines, and its mark."""

    page: Path
    line: int
    lines: tuple[str, ...]
    kind: str
    argument: str

    @property
    def has_results(self) -> bool:
        cells = (cell for line in self.lines[2:] for cell in line.split("|"))
        return sum(FIGURE.search(cell) is not None for cell in cells) >= 3


def tables_of(page: Path) -> Iterator[DocTable]:
    """Yield the tables of a page with their marks; the kind "" stands for none."""
    lines = page.read_text(encoding="utf-8").splitlines()
    text = "\n".join(lines)
    at = 0
    while at < len(lines):
        end = at
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        if end > at:
            above = [line for line in lines[max(0, at - 2) : at] if line.strip()]
            mark = MARK.fullmatch(above[-1].strip()) if above else None
            kind, argument = (mark[1], mark[2] or "") if mark else ("", "")
            if not kind and WHOLE_PAGE in text:
                kind = "no record"
            yield DocTable(page, at + 1, tuple(lines[at:end]), kind, argument)
        at = max(end, at + 1)


def pages(root: Path = REPOSITORY) -> list[Path]:
    """Return every page that may have a recorded table."""
    return [
        root / "README.md", *sorted((root / "docs").rglob("*.md")),
        *sorted((root / "studies").rglob("*.md")), *sorted((root / "examples").rglob("*.md")),
    ]  # fmt: skip


def recorded(root: Path = REPOSITORY) -> list[DocTable]:
    """Return every recorded table of the pages."""
    return [one for page in pages(root) for one in tables_of(page) if one.kind == "record"]


def differing(one: DocTable) -> list[str]:
    """Return where a recorded table differs from its archive."""
    wanted = table_lines(one.argument)
    if len(one.lines) != len(wanted):
        return [f"{one.page}:{one.line}: {len(one.lines)} lines, the record gives {len(wanted)}"]
    return [
        f"{one.page}:{one.line + i}: the row is {a!r}, the record gives {b!r}"
        for i, (a, b) in enumerate(zip(one.lines, wanted, strict=True))
        if a != b
    ]


def unmarked(root: Path = REPOSITORY, names: Sequence[str] = RESULTS) -> list[str]:
    """Return the tables of results without a mark, and pages that are silent on the missing record
    of a table."""
    faults = []
    for name in names:
        tables = list(tables_of(root / name))
        faults += [
            f"{name}:{one.line}: a table without a mark (see studies/pages.py)"
            for one in tables
            if not one.kind and one.has_results
        ]
        silent = NOT_KEPT not in (root / name).read_text(encoding="utf-8")
        if silent and any(one.kind == "no record" for one in tables):
            faults.append(f"{name}: has tables without a record and does not tell its readers")
    return faults


def write(root: Path = REPOSITORY) -> list[str]:
    """Write every recorded table anew, and return the pages that changed."""
    changed = []
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        lines = text.splitlines()
        for one in reversed(list(tables_of(page))):
            if one.kind == "record":
                lines[one.line - 1 : one.line - 1 + len(one.lines)] = table_lines(one.argument)
        if (fresh := "\n".join(lines) + "\n") != text:
            page.write_text(fresh, encoding="utf-8")
            changed.append(str(page.relative_to(root)))
    return changed
