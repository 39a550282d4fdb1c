"""Batching: many questions' asks in one call, and nobody pays for another's."""

import asyncio
from collections.abc import Sequence

import pytest
from scripted_sampler import Babbler, Scripted, words

from protocols.errors import DataError, RunError
from protocols.replay import Message
from protocols.types import Sampling
from strategies.batching import Batching
from strategies.catalog import parse, run
from strategies.port import Answer, Ask

ASKED = (Message("user", "what is it?"),)


def ask(name: str) -> Ask:
    return Ask(name, ASKED, Sampling(max_tokens=5), seed=0)


def test_questions_go_in_lockstep_and_each_as_it_would_alone() -> None:
    strategy = parse("beam_search", {"beams": 2, "candidates": 3})

    async def all_at_once() -> None:
        under = Babbler()
        batching = Batching(under)
        kwargs = {"form": "general", "max_tokens": 30}
        together = await asyncio.gather(
            *(run(strategy, batching, ASKED, seed=s, **kwargs) for s in range(20))  # type: ignore[arg-type]
        )
        alone = [await run(strategy, Babbler(), ASKED, seed=s, **kwargs) for s in range(20)]  # type: ignore[arg-type]
        assert [(r.text, r.token_ids, r.answer) for r in together] == [
            (r.text, r.token_ids, r.answer) for r in alone
        ]
        assert [r.spent.tokens for r in together] == [r.spent.tokens for r in alone]
        # As many calls as the longest question needs, and not the sum of all.
        assert len(under.calls) == max(r.spent.calls for r in alone)
        assert len(under.calls[0]) == 20 * 3

    asyncio.run(all_at_once())


def test_a_call_holds_no_more_than_it_may() -> None:
    async def go() -> None:
        under = Scripted(lambda a: words(a.id))
        batching = Batching(under, most=3)
        said = await asyncio.gather(
            batching([ask("a"), ask("b")]), batching([ask("c")]), batching([ask("d")]),
            batching([ask(str(i)) for i in range(4)]), batching([]),
        )  # fmt: skip
        assert [[a.text for a in part] for part in said] == [
            ["a", "b"], ["c"], ["d"], ["0", "1", "2", "3"], [],
        ]  # fmt: skip
        assert sorted(len(c) for c in under.calls) == [1, 3, 4]

    asyncio.run(go())


def test_what_lingers_goes_together() -> None:
    async def go() -> None:
        under = Scripted(lambda a: words(a.id))
        batching = Batching(under, linger_s=0.5)

        async def late() -> None:
            await asyncio.sleep(0.01)
            await batching([ask("b")])

        await asyncio.gather(batching([ask("a")]), late())
        assert [[a.id for a in c] for c in under.calls] == [["a", "b"]]

    asyncio.run(go())


class Refusing(Scripted):
    def __init__(self, error: Exception) -> None:
        super().__init__(lambda a: words(a.id))
        self._error = error

    async def __call__(self, asks: Sequence[Ask]) -> list[Answer]:
        self.calls.append(list(asks))
        if any(a.id == "bad" for a in asks):
            raise self._error
        return await super().__call__(asks)


def test_a_refused_ask_fails_its_own_caller_alone() -> None:
    async def go() -> None:
        batching = Batching(Refusing(DataError("no such cartridge")))
        good, bad, other = await asyncio.gather(
            batching([ask("good")]), batching([ask("bad")]), batching([ask("other")]),
            return_exceptions=True,
        )  # fmt: skip
        assert isinstance(bad, DataError)
        assert [good[0].text, other[0].text] == ["good", "other"]  # type: ignore[index]

    asyncio.run(go())


def test_a_backend_that_fails_fails_all_of_the_call() -> None:
    async def go() -> None:
        batching = Batching(Refusing(RunError("nobody answers")))
        told = await asyncio.gather(
            batching([ask("good")]), batching([ask("bad")]), return_exceptions=True
        )
        assert all(isinstance(e, RunError) for e in told)
        assert (await batching([ask("good")]))[0].text == "good"

    asyncio.run(go())


class Slow(Scripted):
    def __init__(self) -> None:
        super().__init__(lambda a: words(a.id))
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, asks: Sequence[Ask]) -> list[Answer]:
        self.begun.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return await super().__call__(asks)


def test_a_call_lives_as_long_as_one_of_its_callers() -> None:
    async def go() -> None:
        under = Slow()
        batching = Batching(under)
        first, second = (asyncio.create_task(batching([ask(n)])) for n in "ab")
        await under.begun.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        under.go_on.set()
        assert (await second)[0].text == "b"
        assert not under.cancelled.is_set()

        under.begun.clear()
        under.go_on.clear()
        alone = asyncio.create_task(batching([ask("c")]))
        await under.begun.wait()
        alone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await alone
        async with asyncio.timeout(10):
            await under.cancelled.wait()

    asyncio.run(go())
