"""Implement the commands of `forge`, one module each; forge_run.cli has their table."""

import sys


def note(line: str) -> None:
    """Print a line about progress to stderr; it is no part of the output."""
    print(line, file=sys.stderr, flush=True)
