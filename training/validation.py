"""Run validation in the background of the next training step, while the generators are idle.

    step s ends, its row is held  ->  rollout s + 1  ->  validation beside scoring and training
    ->  the row is written  ->  publish s + 1

The generators hold the measured version until the next publish, which waits for validation. So
validation costs a step only the time by which it outlasts scoring and training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from protocols.records.run_files import MetricRow


class OverlappedValidation:
    """Measure held-out accuracy with `measure`, then write the waiting row with `tell`.

    `settled` may be called again after it was cancelled: a last checkpoint then writes the row.
    """

    def __init__(
        self, measure: Callable[[int], Awaitable[float]], tell: Callable[[MetricRow], None]
    ) -> None:
        self._measure, self._tell = measure, tell
        self._row: MetricRow | None = None
        self._task: asyncio.Future[float] | None = None

    def hold(self, row: MetricRow) -> None:
        """Keep a step's row until its version is measured; one row at a time."""
        assert self._row is None, "the row before was not settled"
        self._row = row

    def begin(self) -> None:
        """Start to measure the held row's version, unless a measurement runs already."""
        if self._row is not None and (self._task is None or self._task.cancelled()):
            self._task = asyncio.ensure_future(self._measure(self._row.version))

    async def settled(self) -> None:
        """Wait for the measurement and write its row; return at once without one. An error of
        `measure` is raised, and no row written."""
        self.begin()
        if self._row is None or self._task is None:
            return
        accuracy = await self._task
        row, self._row, self._task = self._row, None, None
        self._tell(replace(row, accuracy=accuracy))
