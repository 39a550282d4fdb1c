"""Shares of the generators between keys, in an order worked by hand."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from cartridge_forge.plugins.chat.wire.errors import ApiError
from cartridge_forge.plugins.serve.access.admission import Admission, RequestCost
from cartridge_forge.plugins.serve.access.fairness import FairTurns


class Batch:
    """Requests over a batch of so many rows; `order` has the names of those that started."""

    def __init__(self, rows: int) -> None:
        self.turns, self.order = FairTurns(lambda: 1, rows), list[str]()
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def send(self, name: str, rows: int = 1, tokens: int = 10) -> None:
        """Send a request; its key is the first letter of its name."""
        self._ends[name] = asyncio.Event()

        async def run() -> None:
            async with self.turns.turn(name[0], RequestCost(rows, tokens)):
                self.order.append(name)
                await self._ends[name].wait()

        self._tasks[name] = asyncio.create_task(run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self._tasks[name]
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def leave(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.wait([self._tasks[name]])
        await asyncio.sleep(0)


def test_an_idle_key_goes_before_a_flooding_one() -> None:
    async def check() -> list[str]:
        batch = Batch(rows=8)  # of which one key has 7 at most
        for number in range(20):
            await batch.send(f"f{number}")
        assert batch.order == [f"f{n}" for n in range(7)]
        await batch.send("p0")  # at once, into the row that is left for others
        assert batch.order[-1] == "p0"
        await batch.send("p1")
        await batch.end("f0")
        return batch.order[8:]

    assert asyncio.run(check()) == ["p1"]


def test_keys_that_always_wait_get_equal_tokens() -> None:
    async def check() -> list[str]:
        batch = Batch(rows=1)
        await batch.send("x")
        for number in range(4):
            await batch.send(f"a{number}", tokens=30)
        for number in range(8):
            await batch.send(f"b{number}", tokens=10)
        for name in ("x", *["?"] * 8):
            await batch.end(batch.order[-1] if name == "?" else name)
        return batch.order[1:]

    # Virtual times after each start: a 30, b 10, b 20, b 30, a 60, b 40, b 50, b 60, a 90.
    assert asyncio.run(check()) == ["a0", "b0", "b1", "b2", "a1", "b3", "b4", "b5", "a2"]


def test_a_wide_request_is_not_starved_and_may_be_wider_than_the_batch() -> None:
    async def check() -> list[str]:
        batch = Batch(rows=8)
        for number in range(4):
            await batch.send(f"a{number}")
        await batch.send("w0", rows=32, tokens=5)  # counts as the 7 that one key may have
        await batch.send("c0")  # would fit, and came later
        for number in range(4):
            await batch.send(f"b{number}")
        assert batch.order == ["a0", "a1", "a2", "a3"]
        for number in range(3):
            await batch.end(f"a{number}")
        return batch.order[4:]

    assert asyncio.run(check()) == ["w0"]


def test_who_leaves_gives_its_place_back() -> None:
    async def check() -> list[str]:
        batch = Batch(rows=1)
        for name in ("a0", "b0", "c0"):
            await batch.send(name)
        await batch.leave("b0")
        await batch.leave("a0")
        return batch.order

    assert asyncio.run(check()) == ["a0", "c0"]


def test_a_key_within_its_share_is_admitted_beside_a_full_queue() -> None:
    admission = Admission(256, 2**20)
    with ExitStack() as inside:
        for _ in range(8):
            inside.enter_context(admission.let_in(RequestCost(32, 100), "flooding"))
        with pytest.raises(ApiError) as refused, admission.let_in(RequestCost(1, 1), "flooding"):
            pass
        assert refused.value.status_code == 429
        for _ in range(10):
            inside.enter_context(admission.let_in(RequestCost(1, 100), "polite"))
        inside.enter_context(admission.let_in(RequestCost(118, 100), "polite"))  # 128 of 256
        with pytest.raises(ApiError), admission.let_in(RequestCost(1, 1), "polite"):
            pass
        inside.enter_context(admission.let_in(RequestCost(85, 1), "third"))  # 256 // 3
        with pytest.raises(ApiError), admission.let_in(RequestCost(1, 1), "third"):
            pass
    assert (admission.pending, admission.tokens) == (0, 0)


def test_shares_are_of_tokens_too() -> None:
    admission = Admission(256, 1000)
    with ExitStack() as inside:
        inside.enter_context(admission.let_in(RequestCost(1, 1000), "flooding"))
        with pytest.raises(ApiError), admission.let_in(RequestCost(1, 501), "polite"):
            pass
        inside.enter_context(admission.let_in(RequestCost(1, 500), "polite"))
        with pytest.raises(ApiError), admission.let_in(RequestCost(1, 1), "polite"):
            pass
