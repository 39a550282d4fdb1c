"""Accept commands for a run at any time, and execute them between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

from cartridge_forge.protocols.errors import RunError, SpecError, StopRequested
from cartridge_forge.protocols.records.status import PoolStatus, RunStatus
from cartridge_forge.services.pool.pool import Pool
from cartridge_forge.services.roles import ALONE
from cartridge_forge.services.run_log import RunLog

CHECKPOINT_SECONDS = 300.0  # until the step in progress has ended and its state is on disk


class RunCommands:
    """Implement the `RunControl` port (protocols.ports) of one run, which calls `between_steps`."""

    def __init__(
        self,
        status: Callable[[], RunStatus],
        show: Callable[..., None],
        pools: Callable[[], Mapping[str, Pool]],
        recorder: RunLog,
        scale: Callable[[str, int], Awaitable[None]],
        most_replicas: int,
    ) -> None:
        self._status, self._show, self._pools, self._recorder = status, show, pools, recorder
        self._scale, self._most_replicas = scale, most_replicas
        self._stopping = False
        self._going = asyncio.Event()
        self._going.set()
        self._checkpoints: list[asyncio.Future[str]] = []
        self._wake = asyncio.Event()  # wakes a paused run for a new command

    # -- commands -------------------------------------------------------------------------------

    async def status(self) -> RunStatus:
        return self._status()

    async def scale(self, role: str, replicas: int) -> PoolStatus:
        pools = self._pools()
        if role not in pools:
            raise SpecError(f"no pool {role!r}; this run has {', '.join(sorted(pools)) or 'none'}")
        if role in ALONE:
            raise SpecError(f"{role} cannot be scaled: there is one of it in a run")
        if not 1 <= replicas <= self._most_replicas:
            raise SpecError(
                f"replicas must be >= 1 and <= {self._most_replicas} (control.max_replicas): got "
                f"{replicas} for {role}"
            )
        pool = pools[role]
        limits = pool.spec.autoscale
        if limits is not None and not limits.min <= replicas <= limits.max:
            raise SpecError(
                f"replicas of {role} must be within roles.{role}.autoscale ({limits.min} to "
                f"{limits.max}): got {replicas}; its load decides within them"
            )
        if replicas != pool.target:
            previous = pool.target
            await self._scale(role, replicas)
            self._recorder.event("scaled", role=role, replicas=replicas, before=previous, by="hand")
        return pool.status()

    async def pause(self) -> None:
        self._refuse_when_over("pause")
        if self._going.is_set():
            self._going.clear()
            self._show(message="pausing after this step")

    async def resume(self) -> None:
        self._refuse_when_over("resume")
        if not self._going.is_set():
            self._going.set()
            self._show(message="")
            self._wake.set()

    async def checkpoint(self) -> str:
        self._refuse_when_over("checkpoint")
        saved: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._checkpoints.append(saved)
        self._wake.set()
        try:
            return await asyncio.wait_for(saved, CHECKPOINT_SECONDS)
        except TimeoutError as error:
            raise RunError(
                f"no checkpoint within {CHECKPOINT_SECONDS:g} s; is it stalled?"
            ) from error

    async def stop(self) -> None:
        if not self._status().done:
            self._stopping = True
            self._show(message="stopping after this step")
            self._wake.set()

    def events(self, replay: int) -> AsyncIterator[Mapping[str, Any]]:
        return self._recorder.follow(replay)

    # -- called by the run ----------------------------------------------------------------------

    async def between_steps(self, checkpoint: Callable[[], Awaitable[str]]) -> None:
        """Execute pending commands; after `pause`, wait for `resume`. Raises StopRequested."""
        await self._write(checkpoint)
        if not self._going.is_set() and not self._stopping:
            self._show(paused=True, message="paused")
            self._recorder.event("paused")
            while not self._going.is_set() and not self._stopping:
                await self._wake.wait()
                self._wake.clear()
                await self._write(checkpoint)
            self._show(paused=False, message="")
            self._recorder.event("resumed")
        if self._stopping:
            raise StopRequested

    def over(self) -> None:
        """Fail the commands that still wait for a checkpoint, after the run has ended."""
        _answer(self._checkpoints, RunError("the run ended before the checkpoint was written"))
        self._checkpoints.clear()

    async def _write(self, checkpoint: Callable[[], Awaitable[str]]) -> None:
        waiting, self._checkpoints = self._checkpoints, []
        if not waiting:
            return
        try:
            name = await checkpoint()
        except BaseException as error:
            _answer(waiting, RunError(f"the checkpoint was not written: {error!r}"))
            raise
        _answer(waiting, name or RunError("nothing is trained yet: nothing to keep"))

    def _refuse_when_over(self, what: str) -> None:
        status = self._status()
        if status.done:
            raise RunError(f"cannot {what}: the run has ended ({status.stage})")


def _answer(futures: Iterable[asyncio.Future[str]], answer: str | RunError) -> None:
    for future in futures:
        if future.done():  # the caller cancelled it
            continue
        if isinstance(answer, str):
            future.set_result(answer)
        else:
            future.set_exception(answer)


class RunControl(Protocol):
    """Control a run from outside. Every method raises ForgeError with a remedy for a request that
    cannot be met, and then leaves the run unchanged."""

    async def status(self) -> RunStatus: ...

    async def scale(self, role: str, replicas: int) -> PoolStatus:
        """Set a pool's target size and return at once, while replicas start or drain."""
        ...

    async def pause(self) -> None:
        """Hold the run after the step in progress, until `resume` or `stop`."""
        ...

    async def resume(self) -> None: ...

    async def checkpoint(self) -> str:
        """Write a checkpoint after the step in progress; returns its name once it is on disk."""
        ...

    async def stop(self) -> None:
        """End after the step in progress, with a checkpoint and results; returns at once."""
        ...

    def events(self, replay: int) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the last `replay` events of the run, then each new event until the run ends."""
        ...
