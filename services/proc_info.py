"""Read state, children and processor seconds of processes of this host from Linux' /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")  # a second


@dataclass(frozen=True)
class CpuSeconds:
    """Hold processor seconds of some `chosen` processes, and of `all` of their family."""

    chosen: float
    all: float

    def since(self, earlier: CpuSeconds) -> CpuSeconds:
        return CpuSeconds(self.chosen - earlier.chosen, self.all - earlier.all)

    @property
    def share(self) -> float:
        """Return the part of all seconds that the chosen processes took; 0 of none."""
        return self.chosen / self.all if self.all > 0 else 0.0


def cpu_seconds(pid: int, chosen: Collection[int]) -> CpuSeconds:
    """Return user and system seconds of the `chosen` processes, and of the process `pid` with all
    its descendants, the dead ones included that their parents have waited for."""
    own_seconds, waited = {}, {}
    for member in (pid, *descendants(pid)):
        with contextlib.suppress(OSError):  # gone meanwhile
            fields = _fields(Path(f"/proc/{member}/stat").read_text())
            user, system, children_user, children_system = map(int, fields[11:15])
            own_seconds[member] = (user + system) / TICKS
            waited[member] = (children_user + children_system) / TICKS
    total = sum(own_seconds.values()) + sum(waited.values())
    return CpuSeconds(sum(seconds for p, seconds in own_seconds.items() if p in chosen), total)


def has_ended(pid: int) -> bool:
    """Return whether a process of this host is gone, or dead and not yet reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return _fields(stat)[0] in "ZX"


def began(pid: int) -> str:
    """Return what tells a live process of this host from any other: "TICKS/NAMESPACE/BOOT", the
    time it began, its process ids' namespace and the machine's boot. TICKS is "" for a dead one."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    space = os.stat("/proc/self/ns/pid").st_ino
    try:
        fields = _fields(Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        fields = ["X"]
    return f"{'' if fields[0] in 'ZX' else fields[19]}/{space}/{boot}"


def descendants(pid: int) -> set[int]:
    """Return the ids of all live descendants of a process, without zombies."""
    parents = _parents()
    family = {pid}
    while more := {p for p, parent in parents.items() if parent in family} - family:
        family |= more
    return family - {pid}


def children(pid: int) -> dict[int, str]:
    """Return the names of the live children of a process, by their ids."""
    names = {}
    for child in (p for p, parent in _parents().items() if parent == pid):
        with contextlib.suppress(OSError):  # gone meanwhile
            names[child] = Path(f"/proc/{child}/comm").read_text().strip()
    return names


def _parents() -> dict[int, int]:
    """Return the parent of each live process, without zombies."""
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            state, parent = _fields((process / "stat").read_text())[:2]
            if state not in "ZX":
                parents[int(process.name)] = int(parent)
    return parents


def _fields(stat: str) -> list[str]:
    """Return the fields from the state on. They follow the name, which may hold blanks and
    parentheses."""
    return stat.rpartition(")")[2].split()
