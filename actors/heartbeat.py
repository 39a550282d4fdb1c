"""Answer heartbeats for the process of a replica, beside its actor, over ports.

Monarch 0.7 ends an actor whose endpoint call reaches an actor that has been stopped, also where the
caller handles failures: `_handle_undeliverable_message` is not asked about invalid references. A
message over a port can be dropped instead. Heartbeats go over ports, for the process that they ask
may be stopped by another at any moment.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch.actor import Actor, Channel, concurrent_endpoint

from cartridge_forge.actors.base import BEATING
from cartridge_forge.protocols.step import NOT_BEGUN, Preparation, preparation, work_done

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Heartbeat:
    """Hold a process id, its resident memory, its count of work and how far it has prepared its
    cartridges (`protocols.step`)."""

    pid: int
    memory_bytes: int
    work: int = 0
    prepared: Preparation = NOT_BEGUN


class HeartbeatActor(Actor):
    """Answer while the actor beside it computes: Monarch gives every actor a thread of its own, and
    torch releases the interpreter lock.

    With `alone_s` it kills its process, named BEATING, after that many seconds without a call: on
    an unreachable host nothing else ends a process given up, and it would keep its devices.
    """

    def __init__(self, alone_s: float | None = None) -> None:
        self._asked = time.monotonic()
        if alone_s is not None:
            Path("/proc/self/comm").write_text(BEATING)
            threading.Thread(target=self._end_alone, args=(alone_s,), daemon=True).start()

    @concurrent_endpoint
    async def listen(self, method: str) -> Any:
        """Return a port over which `method` is called (`actors.heartbeat`)."""
        return open_port(getattr(self, method))

    async def beat(self) -> Heartbeat:
        """Tell of this process."""
        self._asked = time.monotonic()
        pid = os.getpid()
        return Heartbeat(pid, resident_bytes(pid), work_done(), preparation())

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


_serving: set[asyncio.Future[None]] = set()  # asyncio itself keeps no task alive


class PortCall:
    """Call a method of an actor that has the endpoint `listen`, which opens the port at the first
    call. A call that cannot be delivered is never answered: bound it by a time limit."""

    def __init__(self, actor: Any, method: str, port: Any = None) -> None:
        self._actor, self._method, self._port = actor, method, port

    def __reduce__(self) -> tuple[Any, ...]:
        return PortCall, (self._actor, self._method, self._port)

    async def call_one(self, *values: Any) -> Any:
        """Return the reply. Raises what the method raises."""
        if self._port is None:
            self._port = await self._actor.listen.call_one(self._method)
        self._port.return_undeliverable = False  # not part of a pickled port
        reply, receiver = Channel[Any].open(once=True)
        self._port.send((values, reply))
        return await receiver.recv()


def open_port(answer: Callable[..., Awaitable[Any]]) -> Any:
    """Return a port whose calls `answer` serves, all at once, while this actor lives."""
    port, receiver = Channel[Any].open()
    _keep(_serve(receiver, answer))
    return port


async def _serve(receiver: Any, answer: Callable[..., Awaitable[Any]]) -> None:
    while True:
        values, reply = await receiver.recv()
        reply.return_undeliverable = False
        _keep(_reply(answer, values, reply))


async def _reply(answer: Callable[..., Awaitable[Any]], values: Any, reply: Any) -> None:
    try:
        reply.send(await answer(*values))
    except Exception as error:
        reply.exception(error)


def _keep(work: Any) -> None:
    task = asyncio.ensure_future(work)
    _serving.add(task)
    task.add_done_callback(_serving.discard)
