"""Run the commands of a page as its reader would, in an empty folder.

A page marks what is run. These are fenced blocks and comments of the page:

    ```sh                         commands, one a line; a line that ends in \\ goes on
    ```yaml title="mine.yaml"     a file that the reader writes, of any language
    <!-- prints: TEXT -->         the commands above print TEXT
    <!-- prints in full: TEXT --> they do so, but not in the short way
    <!-- short: --set a=1 -->     the short way appends this to each command of the next block
    <!-- long -->                 the short way leaves the next block out
    <!-- before -->               the next block has been run before any test: `make install`
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
CORE = ROOT / "docs" / "explanation" / "core.md"
PAGES = sorted(page.name for page in TUTORIALS.glob("*.md") if page.name != "index.md")
FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?$")
COMMENT = re.compile(r"^<!-- (prints|prints in full|short|long|before)(?:: (.*))? -->$")


@dataclass
class TutorialBlock:
    """Hold a fenced block: a file to write where it has a title, commands where it is sh."""

    language: str
    title: str | None
    text: str
    marks: dict[str, str]
    prints: list[str] = field(default_factory=list)
    prints_in_full: list[str] = field(default_factory=list)

    def commands(self, short: bool) -> list[str]:
        """Return its commands, in the short way with what the page appends to them."""
        lines = self.text.replace("\\\n", " ").splitlines()
        more = f" {self.marks['short']}" if short and "short" in self.marks else ""
        return [line + more for line in lines if line.strip() and not line.startswith("#")]


def blocks(page: str) -> Iterator[TutorialBlock]:
    """Yield the fenced blocks of a page, each with the comments about it."""
    found: list[TutorialBlock] = []
    marks: dict[str, str] = {}
    lines = iter(page.splitlines())
    for line in lines:
        if comment := COMMENT.match(line):
            name, text = comment.group(1), comment.group(2) or ""
            if name == "prints":
                found[-1].prints.append(text)
            elif name == "prints in full":
                found[-1].prints_in_full.append(text)
            else:
                marks[name] = text
        elif fence := FENCE.match(line):
            body = "".join(f"{inner}\n" for inner in iter(lines.__next__, "```"))
            found.append(TutorialBlock(fence.group(1), fence.group(2), body, marks))
            marks = {}
    yield from found


def page_files(page: str) -> list[str]:
    """Return the source files that the first columns of a page's tables name."""
    columns = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return [name for column in columns for name in re.findall(r"`([\w/]+\.py)`", column)]


def console_scripts(folder: Path, python: Path | str = sys.executable) -> Path:
    """Write `forge`, `forge-run`, `python` and `pip` of this tree and `python`, and return their
    folder."""
    folder.mkdir(parents=True)
    call = '-c "import sys; from cartridge_forge.forge_run.cli import {0}; sys.exit({0}())"'
    for name, arguments in (
        ("forge", call.format("forge")), ("forge-run", call.format("forge_run")), ("python", ""),
        ("pip", "-m pip"),
    ):  # fmt: skip
        words = f'exec "{python}" {arguments} "$@"'
        (folder / name).write_text(f"#!/bin/sh\n{words}\n")
        (folder / name).chmod(0o755)
    return folder


def environment(folder: Path) -> Path:
    """Make a virtual environment that reads this one's packages and installs into itself. Return
    its Python."""
    venv.create(folder, symlinks=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    (packages / "parent.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin" / "python"


def as_a_reader() -> dict[str, str]:
    """Return this process's environment with Monarch's own limits, not those of these tests."""
    return {k: v for k, v in os.environ.items() if not k.startswith("HYPERACTOR_")}


def follow(
    page: Path, folder: Path, *, short: bool, timeout_s: float, installs: bool = False
) -> list[str]:
    """Write the page's files and run its commands in `folder`, in order; return the commands run.
    A page that `installs` a package does so in a virtual environment of its own.

    Raises AssertionError for a command that fails, takes longer, or does not print what the page
    says.
    """
    python = environment(folder / "environment") if installs else sys.executable
    scripts = console_scripts(folder / "scripts", python)
    home = folder / "home"
    home.mkdir()
    env = {
        **as_a_reader(),
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "TINY": str(ROOT / "models" / "clinic-reader"),  # for the short way
        "CHECKOUT": str(ROOT),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done: list[str] = []
    for block in blocks(page.read_text()):
        if "before" in block.marks or (short and "long" in block.marks):
            continue
        if block.title:
            path = home / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "sh":
            commands = block.commands(short)
            ended = subprocess.run(
                ["bash", "-euc", "\n".join(commands)], cwd=home, env=env, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s,
            )  # fmt: skip
            assert ended.returncode == 0, f"{page.name}: {commands}\n{ended.stdout}"
            for text in [*block.prints, *([] if short else block.prints_in_full)]:
                assert text in ended.stdout, f"{page.name}: {commands} prints no {text!r}"
            done += commands
    return done
