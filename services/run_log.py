"""Record everything that a run reports: first in its files, then to sinks and followers.

event, metric  ->  events.jsonl, metrics.jsonl  ->  sinks (metrics, trace, ...), followers
span, status   ->  sinks
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cartridge_forge.protocols.files import read_rows, steady_time, utc_text
from cartridge_forge.protocols.ports import TelemetrySink, TraceSpan
from cartridge_forge.protocols.records.run_files import EventName, MetricRow
from cartridge_forge.protocols.records.status import RunStatus
from cartridge_forge.protocols.secrets import redacted_row
from cartridge_forge.services.pool.pool import Pool
from cartridge_forge.services.run_directory import RunDirectory

HELD_EVENTS = 1000  # queue length of a slow follower; the oldest are dropped


class NoSink:
    """Implement `TelemetrySink` for a run whose records go to its files alone."""

    def event(self, event: Mapping[str, Any]) -> None:
        pass

    def metric(self, row: MetricRow) -> None:
        pass

    def span(self, span: TraceSpan) -> None:
        pass

    def status(self, status: RunStatus) -> None:
        pass

    def close(self) -> None:
        pass


class RunLog:
    """Write the run's files and call its sinks. A slow follower loses events."""

    def __init__(self, directory: RunDirectory, sink: TelemetrySink) -> None:
        self._directory = directory
        self._sink = sink
        self._followers: set[asyncio.Queue[Mapping[str, Any] | None]] = set()
        self.moved = 0  # number of reports of progress
        self.fault: OSError | None = None  # of the first event that could not be written
        self._phase: TraceSpan | None = None

    def event(self, name: EventName, **facts: Any) -> None:
        """Record an event. Whoever reports one cannot end the run: a disk that takes no event is
        noted in `fault`, and the run ends at its next step."""
        record: Mapping[str, Any]
        try:
            record = self._directory.append_event(name, **facts)
        except OSError as error:
            self.fault = self.fault or error
            record = {"time": utc_text(), "event": name, **redacted_row(facts)}
        self.moved += 1
        self._sink.event(record)
        for queue in self._followers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(record)

    def metric(self, row: MetricRow) -> None:
        self._directory.append_metric(row)
        self._sink.metric(row)

    def span(self, span: TraceSpan) -> None:
        """Report a request or a phase. A request gets the arm and step of the current phase."""
        if self._phase is not None and span.lane != self._phase.lane:
            where = {k: v for k, v in self._phase.facts.items() if k in ("arm", "step")}
            span = span._replace(facts={**where, **span.facts})
        self.moved += span.facts.get("outcome", "ok") == "ok"
        self._sink.span(span)

    def phase(self, name: str, **facts: str | int | float) -> None:
        """Begin a phase and end the one before; "" for none."""
        now = steady_time()
        if self._phase is not None:
            self.span(self._phase._replace(end=now))
        self._phase = TraceSpan("controller", name, now, now, facts) if name else None

    def status(self, status: RunStatus) -> None:
        self._sink.status(status)

    async def follow(self, replay: int) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the last `replay` events, then each new one, until `end_streams`."""
        queue: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue(HELD_EVENTS)
        past = deque(read_rows(self._directory.events), maxlen=replay)
        self._followers.add(queue)
        try:
            for record in past:
                yield record
            while (record_or_end := await queue.get()) is not None:
                yield record_or_end
        finally:
            self._followers.discard(queue)

    def end_streams(self) -> None:
        """End the streams of all followers."""
        for queue in self._followers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    def close(self) -> None:
        """Close the sinks, which write out their buffers."""
        self._sink.close()


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
