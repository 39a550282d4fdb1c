"""Have an event loop's time not count while its process stands still: a paused container, a closed
lid, a frozen machine.

No clock of the system stops for a stopped process (SIGSTOP), so that when it goes on every limit of
a call has passed at once, though nobody had time to answer. A tick each second shows a standstill:
where the loop's time is asked for long after the time before, nothing ran in between.
"""

from __future__ import annotations

import asyncio
import time

TICK_SECONDS = 1.0
STILL_SECONDS = (
    5.0  # a loop that waits or computes is asked for its time sooner, but for standstills
)


class AwakeClock:
    """Return `time.monotonic` without the time of standstills."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._still = 0.0

    def __call__(self) -> float:
        now = time.monotonic()
        gap, self._last = now - self._last, now
        if gap > STILL_SECONDS:
            self._still += gap - TICK_SECONDS
        return now - self._still


def keep_awake_time(loop: asyncio.AbstractEventLoop) -> None:
    """Give a running loop such a clock, once; call it in the loop's thread. A loop with a clock of
    its own, as uvloop has, keeps that."""
    if getattr(type(loop), "time", None) is not asyncio.BaseEventLoop.time:
        return
    if isinstance(loop.time, AwakeClock):
        return
    loop.time = AwakeClock()  # type: ignore[method-assign]  # asyncio asks the loop alone

    def tick() -> None:
        loop.call_later(TICK_SECONDS, tick)

    tick()


def loop_time() -> float:
    """Return the running loop's time, for limits that its waits have."""
    return asyncio.get_running_loop().time()
