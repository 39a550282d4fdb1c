"""HeartbeatActor: lives beside the actor of a replica, and answers for its process."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import Actor, concurrent_endpoint

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life: the process and its resident memory."""

    pid: int
    memory_bytes: int


class HeartbeatActor(Actor):
    """Answers while the actor beside it is deep in a computation: Monarch gives every actor a
    thread of its own, and torch lets go of the interpreter while it computes.

    With `alone_s` it ends its process once nobody has asked it for so many seconds: on a host that
    cannot be reached nobody else can, and what was given up there must not keep its devices.
    """

    def __init__(self, alone_s: float | None = None) -> None:
        self._asked = time.monotonic()
        if alone_s is not None:
            threading.Thread(target=self._end_alone, args=(alone_s,), daemon=True).start()

    @concurrent_endpoint
    async def beat(self) -> Heartbeat:
        self._asked = time.monotonic()
        return Heartbeat(os.getpid(), resident_bytes(os.getpid()))

    @concurrent_endpoint
    async def warm(self, prepare: Callable[[], None]) -> None:
        """Run `prepare` (slow imports), so that an actor spawned here later starts at once."""
        self._asked = math.inf  # it cannot hear meanwhile
        prepare()
        self._asked = time.monotonic()

    @concurrent_endpoint
    async def look(self, paths: Sequence[str]) -> dict[str, tuple[str, bool]]:
        """What this process sees of files: each's digest ("" where there is none to read), and
        whether it may write beside it."""
        return {path: (digest(Path(path)), os.access(Path(path).parent, os.W_OK)) for path in paths}

    def _end_alone(self, alone_s: float) -> None:
        while time.monotonic() - self._asked < alone_s:
            time.sleep(min(1.0, alone_s / 4))
        os.kill(os.getpid(), signal.SIGKILL)


class StoreActor(Actor):
    """Stands for a process whose work is done by others spawned into it: TorchStore's volume."""

    @concurrent_endpoint
    async def ready(self) -> int:
        return os.getpid()


def digest(path: Path) -> str:
    """SHA-256 of a file of this host, in hex; "" where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def resident_bytes(pid: int) -> int:
    """Resident memory of a process of this host; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0
