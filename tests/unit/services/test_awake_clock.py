"""Time in which a process stands still does not count for what its loop waits for."""

from __future__ import annotations

import asyncio
import selectors
import time
from unittest import mock

import pytest

from cartridge_forge.services.awake_clock import keep_awake_time, loop_time


class Standing(selectors.DefaultSelector):
    """A selector that lets time pass instead of waiting, and stands still once, for 500 s."""

    def __init__(self, at: float) -> None:
        super().__init__()
        self.now, self.at = 1000.0, 1000.0 + at

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        if self.now >= self.at:
            self.now, self.at = self.now + 500.0, float("inf")
        return super().select(0)


def seconds(limit: float, wait: float, at: float, keeps: bool) -> tuple[float, float]:
    """Return the loop's and the system's seconds of a wait under a limit."""

    async def scenario() -> tuple[float, float]:
        if keeps:
            for _ in range(2):  # the second changes nothing
                keep_awake_time(asyncio.get_running_loop())
        begun = loop_time(), time.monotonic()
        async with asyncio.timeout(limit):
            await asyncio.sleep(wait)
        return loop_time() - begun[0], time.monotonic() - begun[1]

    clock = Standing(at)

    def now() -> float:
        return clock.now

    with (
        mock.patch.object(time, "monotonic", now),
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner,
    ):
        return runner.run(scenario())


@pytest.mark.parametrize("at", [0.5, 5.2, 9.0])
def test_a_wait_has_the_seconds_that_it_had_before_a_standstill(at: float) -> None:
    by_loop, by_system = seconds(limit=12.0, wait=10.0, at=at, keeps=True)
    assert 10.0 <= by_loop < 11.5  # a tick of a standstill counts
    assert 508.0 < by_system < 512.0


def test_a_limit_still_ends_a_wait() -> None:
    with pytest.raises(TimeoutError):
        seconds(limit=12.0, wait=14.0, at=5.0, keeps=True)


def test_without_the_clock_all_limits_pass_in_a_standstill() -> None:
    with pytest.raises(TimeoutError):
        seconds(limit=12.0, wait=10.0, at=5.0, keeps=False)
