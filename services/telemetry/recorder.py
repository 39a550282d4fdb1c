"""Everything that a run tells of itself, in one place: its files first, then whoever listens.

event, metric  ->  events.jsonl, metrics.jsonl  ->  sinks (metrics, trace, ...), followers
span, status   ->  sinks
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from protocols.files import read_rows
from protocols.ports import TelemetrySink
from protocols.records.run_files import EventName, MetricRow
from protocols.records.status import RunStatus
from protocols.types import TraceSpan
from services.run_directory import RunDirectory

HELD_EVENTS = 1000  # of a follower that does not keep up; the oldest are dropped


class RunLog:
    """Writes the run's record; a follower that is slow loses events, the run no time."""

    def __init__(self, directory: RunDirectory, sink: TelemetrySink) -> None:
        self._directory = directory
        self._sink = sink
        self._followers: set[asyncio.Queue[Mapping[str, Any] | None]] = set()
        self.moved = 0  # how often anything was told that is progress
        self._phase: TraceSpan | None = None

    def event(self, name: EventName, **facts: Any) -> None:
        record = self._directory.append_event(name, **facts)
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
        """A request as a replica served it, or a phase; the request's phase says where it was."""
        if self._phase is not None and span.lane != self._phase.lane:
            where = {k: v for k, v in self._phase.facts.items() if k in ("arm", "step")}
            span = replace(span, facts={**where, **span.facts})
        self.moved += span.facts.get("outcome", "ok") == "ok"
        self._sink.span(span)

    def phase(self, name: str, **facts: str | int | float) -> None:
        """The run is in this phase from now on, and no longer in the one before; "" for none."""
        now = time.time()
        if self._phase is not None:
            self.span(replace(self._phase, end=now))
        self._phase = TraceSpan("controller", name, now, now, facts) if name else None

    def status(self, status: RunStatus) -> None:
        self._sink.status(status)

    async def follow(self, replay: int) -> AsyncIterator[Mapping[str, Any]]:
        """The last `replay` events, then each as it happens, until `end_streams`."""
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
        """Nothing more comes: the followers' streams end."""
        for queue in self._followers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    def close(self) -> None:
        """Have the sinks write out what they hold."""
        self._sink.close()
