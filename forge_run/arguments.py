"""Check arguments of the command line as they are read, without a heavy import."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from cartridge_forge.protocols.errors import DataError, SpecError
from cartridge_forge.protocols.records.status import MOST

GRACE_SECONDS = 6.0  # with it, a run that is told to stop has ended within 10 s


def whole_number(text: str) -> int:
    """Parse a whole number that control.proto can carry."""
    if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) > MOST:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {MOST}: got {text!r}")
    return int(text)


class ElsewhereParser(argparse.ArgumentParser):
    """Parse a command that is to run on another machine: no path is looked for here, and a wrong
    command raises SpecError."""

    def error(self, message: str) -> NoReturn:
        raise SpecError(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise SpecError(message or "it prints a help text and ends; give it a command to run")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print nothing: `--help` would."""


class ExistingPath(argparse.Action):
    """Take paths that must exist: what reads them imports torch first, which takes seconds. Raises
    DataError for one that does not."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any
    ) -> None:
        for path in values if isinstance(values, list) else [values]:
            if not isinstance(parser, ElsewhereParser) and not path.exists():
                run = "name a run's directory, such as runs/longhealth/latest"
                remedy = run if self.metavar == "RUN" else "check the path"
                raise DataError(f"there is nothing at {path}; {remedy}")
        setattr(namespace, self.dest, values)


class ShowVersion(argparse.Action):
    """Print the installed version and leave."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version  # other commands need not spend its time

        print(f"{parser.prog} {version('cartridge-forge')}")
        parser.exit()
