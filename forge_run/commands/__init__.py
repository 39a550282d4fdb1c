"""A command of `forge` a module; forge_run.cli has their table."""

import sys


def note(line: str) -> None:
    """Print a line about progress, which is no part of the output."""
    print(line, file=sys.stderr, flush=True)
