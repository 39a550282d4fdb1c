"""Share the generators between API keys by weighted fair queueing over what requests may cost.

    turn -> the key's queue -> (room in the batch, least virtual time) -> generators

Each key has a virtual time, which a request of it that starts advances by the tokens that it may
cost. The waiting request of the key with the least starts next, so over time keys that always wait
get equal tokens, and one that was idle goes before those that were not. One key never has the whole
batch: an eighth of it is left for the others, so theirs need not wait for a long response to end.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cartridge_forge.plugins.serve.access.admission import RequestCost

ROWS = 64  # that one generator decodes at a time; the rest would wait there in order of arrival
LEFT_FOR_OTHERS = 8  # one row in so many


@dataclass(eq=False)
class WaitingRequest:
    """Hold a request that waits: its rows, its tokens, and what is resolved when it may start."""

    rows: int
    tokens: int
    started: asyncio.Future[None] = field(repr=False)


class FairTurns:
    """Let requests start: `async with turns.turn(key, cost): ...`, in one event loop. `generators`
    tells how many are in service."""

    def __init__(self, generators: Callable[[], int], rows: int = ROWS) -> None:
        self._generators, self._rows = generators, rows
        self._running: Counter[str] = Counter()
        self._queues: dict[str, deque[WaitingRequest]] = {}
        self._times: dict[str, float] = {}  # the virtual time of each key
        self._now = 0.0  # that at which the last request started

    @asynccontextmanager
    async def turn(self, key: str, cost: RequestCost) -> AsyncIterator[None]:
        """Wait until a request of the key may start, and count its rows while the block runs."""
        rows = min(cost.sequences, self._most_of_one())
        started = asyncio.get_running_loop().create_future()
        request = WaitingRequest(rows, cost.tokens, started)
        self._queues.setdefault(key, deque()).append(request)
        self._start()
        try:
            await started
            yield
        finally:
            if request in self._queues.get(key, ()):
                self._queues[key].remove(request)
                self._forget(key)
            else:
                self._running[key] -= rows
            self._start()

    def _most(self) -> int:
        return max(1, self._generators()) * self._rows

    def _most_of_one(self) -> int:
        most = self._most()
        return max(1, most - max(1, most // LEFT_FOR_OTHERS))

    def _start(self) -> None:
        """Start what may start. A request for which the batch lacks rows is not overtaken."""
        while True:
            fit = [k for k, q in self._queues.items() if q and self._fits_key(k, q[0].rows)]
            if not fit:
                return
            key = min(fit, key=self._order)
            request = self._queues[key][0]
            if self._running.total() + request.rows > self._most():
                return
            self._queues[key].popleft()
            self._now = max(self._times.get(key, 0.0), self._now)
            self._times[key] = self._now + request.tokens
            self._running[key] += request.rows
            self._forget(key)
            if not request.started.done():
                request.started.set_result(None)

    def _order(self, key: str) -> tuple[float, int]:
        return max(self._times.get(key, 0.0), self._now), self._running[key]

    def _fits_key(self, key: str, rows: int) -> bool:
        running = self._running[key]
        return running == 0 or running + rows <= self._most_of_one()

    def _forget(self, key: str) -> None:
        """Drop the queue of a key that has none waiting."""
        if not self._queues.get(key):
            self._queues.pop(key, None)
