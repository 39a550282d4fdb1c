"""Write the page of all commands and their options, from the table that argparse is filled with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cartridge_forge.forge_run.cli import COMMANDS, FORGE_RUN, Command
from reference_pages.markdown import code, page, table

ABOUT = """
Every command with its arguments and options. [Commands](commands.md) has examples and exit codes.
An option in capitals takes a value. `--help` prints the same for one command.
"""


def commands_page() -> str:
    """Return the page, a heading for each command."""
    parts = [*_command("forge-run", FORGE_RUN)]
    for name, command in COMMANDS.items():
        parts += _command(f"forge {name}", command)
    return page("Options of all commands", ABOUT, *parts)


def _command(name: str, command: Command) -> Iterator[str]:
    if command.verbs:
        for verb, below in command.verbs.items():
            yield from _command(f"{name} {verb}", below)
        return
    yield f"## {name}"
    yield _sentence(command.help)
    yield table(("option", "meaning"), (_row(*option) for option in command.options))


def _row(name: str, settings: Mapping[str, Any]) -> tuple[str, str]:
    flag = settings.get("action") == "store_true"
    choices = "{" + ",".join(settings["choices"]) + "}" if settings.get("choices") else None
    value = "" if flag else settings.get("metavar") or choices or ""
    shown = f"{name} {value}".strip() if name.startswith("-") else value or name
    if settings.get("nargs") == "+":
        shown += " ..."
    required = " Required." if settings.get("required") else ""
    return code(shown), (settings.get("help") or "") + required


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].rstrip(".") + "."
