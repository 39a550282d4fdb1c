"""Read the state and the children of processes of this host from Linux' /proc."""

from __future__ import annotations

import contextlib
from pathlib import Path


def has_ended(pid: int) -> bool:
    """Return whether a process of this host is gone, or dead and not yet reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return _fields(stat)[0] in "ZX"


def descendants(pid: int) -> set[int]:
    """Return the ids of all live descendants of a process, without zombies."""
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            state, parent = _fields((process / "stat").read_text())
            if state not in "ZX":
                parents[int(process.name)] = int(parent)
    family = {pid}
    while more := {p for p, parent in parents.items() if parent in family} - family:
        family |= more
    return family - {pid}


def _fields(stat: str) -> tuple[str, str]:
    """Return state and parent id. They follow the name, which may hold blanks and parentheses."""
    state, parent = stat.rpartition(")")[2].split()[:2]
    return state, parent
