"""Define who watches and steers a run from beside it: control plane, sinks and watchdog of a
plug-in, none of which the run needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cartridge_forge.protocols.ports import TelemetrySink
from cartridge_forge.protocols.records.status import RunStatus
from cartridge_forge.services.pool.pool import Pool
from cartridge_forge.services.run_log import RunLog


@dataclass(frozen=True)
class ObservedRun:
    """Hold what an observer reads of a run whose mesh is open, and the calls by which it changes
    it: `show` updates the status, `scale` sets the size of a role's pool."""

    log: RunLog
    pools: Mapping[str, Pool]
    status: Callable[[], RunStatus]
    show: Callable[..., None]
    scale: Callable[[str, int], Awaitable[None]]


class RunObserver(Protocol):
    """Watch one run: made with (spec, directory, report), where `report(sink, message)` is called
    for a sink that failed. `sink` gets everything that the run records."""

    sink: TelemetrySink

    async def start(self, run: ObservedRun) -> None:
        """Watch the run from now on, and take commands for it. Raises SpecError."""
        ...

    async def stop_run(self) -> None:
        """Let the run end after the step in progress, also a paused one."""
        ...

    async def between_steps(self, checkpoint: Callable[[], Awaitable[str]]) -> None:
        """Carry out the commands that arrived; `checkpoint` writes one and returns its name. Raises
        StopRequested."""
        ...

    def end_commands(self) -> None:
        """Fail the commands that still wait: the run has ended."""
        ...

    def end_watch(self) -> None:
        """Stop judging the run's progress."""
        ...

    def closings(self) -> Sequence[tuple[str, Callable[[], Any]]]:
        """Return the name and the call of each thing to close once the mesh is down, in order."""
        ...
