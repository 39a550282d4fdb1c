"""Tell of every shell and Python block of README and docs what a test does with it.

`table.yaml` has for each page a row for each of its blocks, by the first line of the block,
or the beginning of it. A row says one of:

    run     tests/nightly/runs/test_page_blocks.py runs it, in a folder outside the tree
    plan    the same, with --dry-run behind each command that can take it, and `make` as `make -n`:
            the run itself is long, or changes the checkout
    test    another test runs it: that file, in which `proves` stands
    why     nothing runs it here: one of the table's reasons
    text    no command, nor Python: what something prints, a formula, a form

and of what is run also:

    needs   run: a finished run in runs/; library: patient_01 in it; server: `forge serve` of it;
            model: smollm2-135m is kept; vllm: it is installed
    leave   lines that begin so are left out
    edit    {text: another}: a placeholder filled in, fewer steps
    before  commands, or lines of Python, that stand before it; `after`: behind it
    prints  texts that it prints
    code    its exit code, where it is not 0
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tutorial_pages import ROOT

TABLE = Path(__file__).with_suffix(".yaml")
SHELL, PYTHON, OTHER = "sh", "python", ""
FILES = ("yaml", "json", "toml", "markdown", "text")  # languages of what is no command
KINDS = ("run", "plan", "test", "why", "text")
FENCE = re.compile(r"^( *)```(\w*)")
# Of these a command can plan and start nothing.
PLANS = ("forge-run ", "forge sweep ", "forge selfstudy ")


@dataclass(frozen=True)
class PageBlock:
    """Hold a block of a page: shell or Python, or of no language."""

    page: str
    language: str
    text: str

    @property
    def first(self) -> str:
        return self.text.partition("\n")[0].strip()


@dataclass(frozen=True)
class BlockRow:
    """Hold a row of the table. `argument` is what its kind says: a file, a reason."""

    page: str
    first: str
    kind: str
    argument: str = ""
    needs: str = ""
    proves: str = ""
    leave: tuple[str, ...] = ()
    edit: dict[str, str] = field(default_factory=dict)
    before: str = ""
    after: str = ""
    prints: tuple[str, ...] = ()
    code: int = 0

    def script(self, block: PageBlock) -> str:
        """Return what is run of a block."""
        lines = block.text.replace("\\\n", " ").splitlines()
        text = "\n".join(one for one in lines if not one.lstrip().startswith(self.leave or ("\0",)))
        for old, new in self.edit.items():
            assert old in text, f"{self.page}: {self.first} has no {old!r} to edit"
            text = text.replace(old, new)
        if self.kind == "plan":
            text = "\n".join(_planned(line) for line in text.splitlines())
        return "".join(f"{part}\n" for part in (self.before, text, self.after) if part)


def _planned(line: str) -> str:
    command, comment = re.fullmatch(r"(.*?)(\s+#\s.*)?", line).groups(default="")
    if command.startswith("make"):
        return f"make -n -C $CHECKOUT{command.removeprefix('make')}{comment}"
    if not command.lstrip().startswith(PLANS) or "--dry-run" in command:
        return line
    return f"{command} --dry-run{comment}"


def pages() -> list[str]:
    """Return README and every page of docs, as paths from the root."""
    found = (ROOT / "docs").rglob("*.md")
    return ["README.md", *sorted(str(one.relative_to(ROOT)) for one in found)]


def page_blocks(page: str) -> Iterator[PageBlock]:
    """Yield the blocks of a page that may be commands or Python: fenced ones of no other language,
    without a title, and indented ones."""
    lines, at = (ROOT / page).read_text(encoding="utf-8").splitlines(), 0
    while at < len(lines):
        if fence := FENCE.match(lines[at]):
            end = next(n for n in range(at + 1, len(lines)) if lines[n].strip() == "```")
            if fence[2] not in FILES and "title=" not in lines[at]:
                language = fence[2] if fence[2] in (SHELL, PYTHON) else OTHER
                cut = len(fence[1])
                yield PageBlock(page, language, "\n".join(one[cut:] for one in lines[at + 1 : end]))
            at = end + 1
        elif lines[at].startswith("    ") and lines[at].strip() and not lines[at - 1].strip():
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            text = "\n".join(one[4:] for one in lines[at:end]).rstrip()
            yield PageBlock(page, OTHER, text)
            at = end
        else:
            at += 1


def table() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return loaded


def rows() -> list[BlockRow]:
    """Return the rows of the table. A row without a first line is of the whole page."""
    found = []
    for page, entries in table()["pages"].items():
        for entry in entries:
            plain = dict(entry)
            first = plain.pop("block", "")
            (kind,) = (kind for kind in KINDS if kind in plain)
            argument = plain.pop(kind)
            for name in ("leave", "prints"):
                plain[name] = tuple(plain.get(name, ()))
            found.append(
                BlockRow(page, str(first), kind, argument if isinstance(argument, str) else "",
                         **plain)
            )  # fmt: skip
    return found


def matched() -> list[tuple[BlockRow, PageBlock]]:
    """Return each block with its row. Raises AssertionError for a block without a row, or with
    several, and for a row without a block."""
    of_page: dict[str, list[BlockRow]] = {}
    for row in (listed := rows()):
        of_page.setdefault(row.page, []).append(row)
    pairs, without = [], []
    for page in pages():
        for block in page_blocks(page):
            fitting = [r for r in of_page.get(page, []) if block.first.startswith(r.first)]
            most = max((len(row.first) for row in fitting), default=0)
            fitting = [row for row in fitting if len(row.first) == most]
            if len(fitting) == 1:
                pairs.append((fitting[0], block))
            else:
                without.append(f"{page}: {block.first}")
    assert not without, f"give each a row in {TABLE.name}:\n" + "\n".join(without)
    used = {id(row) for row, _ in pairs}
    idle = [f"{row.page}: {row.first}" for row in listed if id(row) not in used]
    assert not idle, f"rows of {TABLE.name} without a block:\n" + "\n".join(idle)
    return pairs
