"""Answer heartbeats for the process of a replica, beside its actor."""

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
from typing import Any

from monarch.actor import Actor, concurrent_endpoint

from cartridge_forge.actors.ports import PortCall, open_port
from cartridge_forge.protocols.step import work_done

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Heartbeat:
    """Hold a process id, its resident memory, and its count of work (`protocols.step`)."""

    pid: int
    memory_bytes: int
    work: int = 0


class HeartbeatActor(Actor):
    """Answer while the actor beside it computes: Monarch gives every actor a thread of its own, and
    torch releases the interpreter lock.

    With `alone_s` it kills its process after that many seconds without a call. On an unreachable
    host nothing else can end a process that was given up, and it would keep its devices.
    """

    def __init__(self, alone_s: float | None = None) -> None:
        self._asked = time.monotonic()
        if alone_s is not None:
            threading.Thread(target=self._end_alone, args=(alone_s,), daemon=True).start()

    @concurrent_endpoint
    async def listen(self, method: str) -> Any:
        """Return a port over which `method` is called (`actors.ports`)."""
        return open_port(getattr(self, method))

    async def beat(self) -> Heartbeat:
        """Tell of this process."""
        self._asked = time.monotonic()
        return Heartbeat(os.getpid(), resident_bytes(os.getpid()), work_done())

    @concurrent_endpoint
    async def warm(self, prepare: Callable[[], None]) -> None:
        """Run `prepare` (slow imports), so that an actor spawned here later starts at once."""
        self._asked = math.inf  # no call can arrive meanwhile
        prepare()
        self._asked = time.monotonic()

    @concurrent_endpoint
    async def look(self, paths: Sequence[str]) -> dict[str, tuple[str, bool]]:
        """Return, for each path, the digest of the file ("" where this process cannot read it) and
        whether this process may write beside it."""
        return {path: (digest(Path(path)), os.access(Path(path).parent, os.W_OK)) for path in paths}

    def _end_alone(self, alone_s: float) -> None:
        while time.monotonic() - self._asked < alone_s:
            time.sleep(min(1.0, alone_s / 4))
        os.kill(os.getpid(), signal.SIGKILL)


class HeartbeatHandle:
    """Hold the calls of a heartbeat actor. `beat`, and `beat_host` of one that asks its host, end
    nobody where they reach nobody."""

    def __init__(self, actor: Any) -> None:
        self.beat, self.beat_host = PortCall(actor, "beat"), PortCall(actor, "beat_host")
        self.warm, self.look = actor.warm, actor.look


class StoreActor(Actor):
    """Represent a process in which other actors do the work: TorchStore's volume."""

    @concurrent_endpoint
    async def ready(self) -> int:
        return os.getpid()


def digest(path: Path) -> str:
    """Return the SHA-256 of a file of this host, in hex; "" where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process of this host; 0 where it is unknown."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0
