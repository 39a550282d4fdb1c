"""Validation in the background of the next training step, while the generators are idle.

    step s ends, its row is held  ->  rollout s + 1  ->  validation begins; scores and training
    beside it  ->  the row is written  ->  publish s + 1

Generators idle while teachers and trainer work, and hold the version that is asked about until the
publish, which waits. So validation costs a step only what it takes longer than both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from protocols.records.run_files import MetricRow


class OverlappedValidation:
    """`measure` tells the accuracy of a version; `tell` is given the row that waited for it.

    Who was cancelled while it waited may ask again: for a last checkpoint, which claims the row.
    """

    def __init__(
        self, measure: Callable[[int], Awaitable[float]], tell: Callable[[MetricRow], None]
    ) -> None:
        self._measure, self._tell = measure, tell
        self._row: MetricRow | None = None
        self._task: asyncio.Future[float] | None = None

    def hold(self, row: MetricRow) -> None:
        """Keep a step's row until its version is measured; one at a time."""
        assert self._row is None, "the row before was not settled"
        self._row = row

    def begin(self) -> None:
        """Start to measure what is held, if nothing did yet, or it was given up."""
        if self._row is not None and (self._task is None or self._task.cancelled()):
            self._task = asyncio.ensure_future(self._measure(self._row.version))

    async def settled(self) -> None:
        """Wait for the measure, and write its row; nothing to do without one. Raises what `measure`
        raised: the row is not written then."""
        self.begin()
        if self._row is None or self._task is None:
            return
        accuracy = await self._task
        row, self._row, self._task = self._row, None, None
        self._tell(replace(row, accuracy=accuracy))
