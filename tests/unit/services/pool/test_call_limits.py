"""Calls end at their own deadlines, whichever was made first, though one timer serves them all."""

from __future__ import annotations

import asyncio

from cartridge_forge.services.pool.pool import CallLimits

FAR = 3600.0


async def ended(limits: CallLimits, seconds: float) -> float:
    """Return when a call that nothing answers ended, in seconds of the loop's clock."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as limit:
            limits.add(limit, loop.time() + seconds)
            try:
                await asyncio.Event().wait()
            finally:
                limits.discard(limit)
    except TimeoutError:
        return loop.time()
    raise AssertionError("nothing ended it")


def test_each_call_ends_at_its_own_deadline_and_not_before() -> None:
    async def run() -> None:
        limits, begun = CallLimits(), asyncio.get_running_loop().time()
        given = (0.12, 0.04, 0.2, 0.04)  # a later call may have an earlier deadline
        calls = [asyncio.create_task(ended(limits, seconds)) for seconds in given]
        slow = asyncio.create_task(ended(limits, FAR))
        async with asyncio.timeout(30):
            for call, seconds in zip(calls, given, strict=True):
                assert await call >= begun + seconds
        order = sorted(range(4), key=lambda i: calls[i].result())
        assert sorted(order[:2]) == [1, 3]
        assert order[2:] == [0, 2]
        assert not slow.done()
        assert len(limits) == 1
        limits.end()
        async with asyncio.timeout(30):
            await slow
        assert not limits

    asyncio.run(run())


def test_a_call_that_was_answered_leaves_the_others_their_deadlines() -> None:
    async def run() -> None:
        limits, loop = CallLimits(), asyncio.get_running_loop()
        async with asyncio.timeout(None) as limit:
            limits.add(limit, loop.time() + 0.02)
            await asyncio.sleep(0)
            limits.discard(limit)
        async with asyncio.timeout(30):
            await ended(limits, 0.05)
        async with asyncio.timeout(30):
            await ended(limits, 0.01)

    asyncio.run(run())
