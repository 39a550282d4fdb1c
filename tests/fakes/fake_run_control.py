"""A run without a run: a public `Steering` that answers from memory, and a real control plane over
it on a thread of its own, for clients that block."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from typing import Any

from cartridge_forge.plugins.watch.control.server import ControlPlane
from cartridge_forge.protocols.errors import RunError, SpecError
from cartridge_forge.protocols.records.status import (
    PoolStatus,
    ReplicaState,
    ReplicaStatus,
    RunStatus,
)
from cartridge_forge.protocols.spec.services import ControlSpec

HISTORY = [
    {"time": f"2026-07-26T10:15:4{i}.000Z", "event": "step", "arm": "on_policy", "step": i}
    for i in range(1, 4)
]

REPLICA = ReplicaStatus(
    name="generator[0]", state=ReplicaState.HEALTHY, host="here", pid=4711, ongoing=3, version=12,
    memory_bytes=234_881_024,
)  # fmt: skip
DYING = replace(
    REPLICA, name="generator[1]", state=ReplicaState.DEAD, pid=0, ongoing=0, version=-1,
    memory_bytes=0,
)  # fmt: skip
POOL = PoolStatus(
    role="generator", target=2, waiting=5, replicas=(REPLICA, DYING), requests=90, failures=1,
    retries=4, restarts=6,
)  # fmt: skip
STATUS = RunStatus(
    stage="training on_policy", arm="on_policy", step=12, steps=300, kl=0.4375, accuracy=0.71,
    version=12, tokens_per_second=1834.0, phase="score", phase_seconds={"rollout": 0.25},
    seconds_left=190.0, pools=(POOL,),
)  # fmt: skip


class FakeSteering:
    """One pool, `generator`, of two replicas. `asked` lists what was asked for, in order.

    `failure` is raised by every question. `release` holds `checkpoint` back, and `waiting` says
    that it was asked for. The events after HISTORY are what a test gives `tell`; None ends them.
    `streams` counts the event streams that are open.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.current = STATUS
        self.failure: Exception | None = None
        self.release = asyncio.Event()
        self.release.set()
        self.waiting = asyncio.Event()
        self.streams = 0
        self._listeners: list[asyncio.Queue[Mapping[str, Any] | None]] = []

    async def status(self) -> RunStatus:
        self._note("status")
        return self.current

    async def scale(self, role: str, replicas: int) -> PoolStatus:
        self._note("scale", role, replicas)
        if role != "generator":
            raise SpecError(f"there is no role {role}; roles: generator")
        return replace(POOL, target=replicas)

    async def pause(self) -> None:
        self._note("pause")
        if self.current.paused:
            raise RunError("the run is paused already; forge resume goes on")
        self.current = replace(self.current, paused=True)

    async def resume(self) -> None:
        self._note("resume")
        self.current = replace(self.current, paused=False)

    async def checkpoint(self) -> str:
        self._note("checkpoint")
        self.waiting.set()
        await self.release.wait()
        return "step-000012"

    async def stop(self) -> None:
        self._note("stop")

    async def events(self, replay: int) -> AsyncIterator[Mapping[str, Any]]:
        self._note("events", replay)
        queue: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()
        self._listeners.append(queue)
        self.streams += 1
        try:
            for event in HISTORY[max(0, len(HISTORY) - replay) :]:
                yield event
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self.streams -= 1
            self._listeners.remove(queue)

    def tell(self, event: Mapping[str, Any] | None) -> None:
        for queue in self._listeners:
            queue.put_nowait(event)

    def _note(self, *asked: Any) -> None:
        self.asked.append(asked)
        if self.failure is not None:
            raise self.failure


class Served:
    """A control plane on a thread. `do` runs a function on its loop and waits for it."""

    def __init__(self, steering: FakeSteering, control: ControlPlane, loop: Any) -> None:
        self.steering, self.control, self._loop = steering, control, loop

    @property
    def address(self) -> str:
        return self.control.address

    def do(self, function: Any, *arguments: Any) -> Any:
        async def call() -> Any:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(timeout=60)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.control.stop(), self._loop).result(timeout=60)


@contextlib.contextmanager
def served(spec: ControlSpec | None = None, run: str = "r1") -> Iterator[Served]:
    """Serve a new FakeSteering until the block ends. Raises what the control plane's start does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="control plane")
    thread.start()
    try:

        async def start() -> Served:
            steering = FakeSteering()
            control = ControlPlane(steering, spec or ControlSpec(), run)
            await control.start()
            return Served(steering, control, loop)

        here = asyncio.run_coroutine_threadsafe(start(), loop).result(timeout=60)
        try:
            yield here
        finally:
            here.stop()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=60)
        loop.close()
