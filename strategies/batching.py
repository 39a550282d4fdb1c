"""Many questions at once: asks of one turn of the event loop become one call.

    question 1 --[a, b]--.
    question 2 --[c]------+--(next turn of the loop)-->  sampler([a, b, c, ...])  --> each its own
    question 3 --[d, e]--'

Strategies run by `asyncio.gather` over one `Batching` so go in lockstep, and the backend sees
batches as large as the questions are many. What is asked while a call is under way goes in a call
of its own, beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocols.errors import DataError
from strategies.port import Ability, Answer, Ask, Sampler


@dataclass(eq=False)
class _Part:
    """What one caller asked, and where its answers go."""

    asks: Sequence[Ask]
    answers: asyncio.Future[list[Answer]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Batching:
    """A `Sampler` over another. One event loop only.

    A call has `most` asks at the most, but for a caller who asks more at once; it waits for
    `linger_s` (a few milliseconds keep together what fell out of step). A DataError is told
    to the caller whose ask it was, by calls of each one's own; whatever else the sampler raises, to
    all of the call. A call whose callers have all been cancelled is cancelled too.
    """

    def __init__(self, sampler: Sampler, most: int = 256, linger_s: float = 0.0) -> None:
        self._sampler = sampler
        self._most = most
        self._linger_s = linger_s
        self._waiting: list[_Part] = []
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def abilities(self) -> frozenset[Ability]:
        return self._sampler.abilities

    async def __call__(self, asks: Sequence[Ask]) -> list[Answer]:
        if not asks:
            return []
        part = _Part(asks)
        self._waiting.append(part)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_later(self._linger_s, self._send)
        return await part.answers

    def _send(self) -> None:
        waiting, self._waiting = [p for p in self._waiting if not p.answers.done()], []
        parts: list[_Part] = []
        for part in waiting:
            if parts and sum(len(p.asks) for p in parts) + len(part.asks) > self._most:
                self._start(parts)
                parts = []
            parts.append(part)
        if parts:
            self._start(parts)

    def _start(self, parts: list[_Part]) -> None:
        call = asyncio.create_task(self._call(parts))
        self._calls.add(call)  # the loop itself holds tasks weakly
        call.add_done_callback(self._calls.discard)

        def left(_: asyncio.Future[list[Answer]]) -> None:
            if all(p.answers.cancelled() for p in parts):
                call.cancel()

        for part in parts:
            part.answers.add_done_callback(left)

    async def _call(self, parts: list[_Part]) -> None:
        try:
            answers = iter(await self._sampler([a for p in parts for a in p.asks]))
            for part in parts:
                mine = [next(answers) for _ in part.asks]
                if not part.answers.done():
                    part.answers.set_result(mine)
        except DataError as error:
            if len(parts) == 1:
                _fail(parts, error)
            else:
                await asyncio.gather(*(self._call([p]) for p in parts if not p.answers.done()))
        except asyncio.CancelledError:
            for part in parts:
                part.answers.cancel()
            raise
        except Exception as error:
            _fail(parts, error)


def _fail(parts: Sequence[_Part], error: Exception) -> None:
    for part in parts:
        if not part.answers.done():
            part.answers.set_exception(error)
