"""Groups sampled ahead: the first that are complete, none too old; requests joined into calls."""

import asyncio
from collections.abc import Sequence

import pytest

from cartridge_forge.plugins.episodes.ahead import GroupsAhead, JoinedGenerate, TakenGroups
from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef, Sampling

Group = tuple[int, int, int]  # step, number, oldest version


class House:
    """Groups that end when a test says so, at the version that it says."""

    def __init__(self) -> None:
        self.version = 0
        self.ends: dict[tuple[int, int], asyncio.Event] = {}
        self.groups: GroupsAhead[Group] = GroupsAhead(self.play, lambda group: group[2])

    async def play(self, step: int, number: int) -> Group:
        began = self.version
        end = self.ends.setdefault((step, number), asyncio.Event())
        await end.wait()
        return step, number, began

    def end(self, step: int, number: int) -> None:
        self.ends.setdefault((step, number), asyncio.Event()).set()

    def take(
        self, step: int, floor: int, wanted: int = 2, missing: Sequence[int] = (0,), rounds: int = 0
    ) -> "asyncio.Task[TakenGroups[Group]]":
        left = list(missing)
        return asyncio.create_task(
            self.groups.take(step, wanted, floor, lambda taken: left.pop(0), rounds)
        )


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_step_takes_those_that_are_complete_first_of_whichever_step() -> None:
    async def run() -> None:
        house = House()
        first, second = house.take(0, 0), house.take(1, 0)
        await turns()
        house.end(0, 1)
        await turns()
        assert not first.done()
        house.end(1, 0)
        taken = await first
        assert [g[:2] for g in taken.groups] == [(0, 1), (1, 0)]
        assert (taken.started, taken.dropped) == (2, 0)
        house.end(0, 0)
        house.end(1, 1)
        assert [g[:2] for g in (await second).groups] == [(0, 0), (1, 1)]

    asyncio.run(run())


def test_the_earlier_step_is_served_first() -> None:
    async def run() -> None:
        house = House()
        first, second = house.take(0, 0), house.take(1, 0)
        await turns()
        for step, number in ((1, 0), (1, 1)):
            house.end(step, number)
        await turns()
        assert first.done()
        assert not second.done()
        await house.groups.close()
        second.cancel()

    asyncio.run(run())


def test_a_group_beyond_the_bound_is_dropped_counted_and_replaced() -> None:
    async def run() -> None:
        house = House()
        house.version = 3
        slow = house.take(3, 3, wanted=1)
        await turns()
        house.version = 5
        late = house.take(5, 4, wanted=1)  # bound 1: nothing older than version 4
        await turns()
        house.end(5, 0)
        assert [g[:2] for g in (await slow).groups] == [(5, 0)]
        house.end(3, 0)  # began at version 3
        await turns()
        assert not late.done()
        house.end(5, 1)  # started in its place, at version 5
        taken = await late
        assert taken == TakenGroups([(5, 1, 5)], started=2, dropped=1)

    asyncio.run(run())


def test_further_groups_are_started_while_some_are_missing_and_rounds_are_left() -> None:
    async def run() -> None:
        house = House()
        for number in range(6):
            house.end(0, number)
        taken = await house.take(0, 0, wanted=2, missing=(2, 1, 9), rounds=2)
        assert [g[1] for g in taken.groups] == [0, 1, 2, 3, 4]
        assert taken.started == 5

    asyncio.run(run())


def test_what_a_group_raises_reaches_the_step_that_takes_it() -> None:
    async def run() -> None:
        async def play(step: int, number: int) -> Group:
            raise ValueError(f"group {number}")

        groups: GroupsAhead[Group] = GroupsAhead(play, lambda group: group[2])
        with pytest.raises(ValueError, match="group 0"):
            await groups.take(0, 1, 0, lambda taken: 0, 0)

    asyncio.run(run())


def test_close_ends_the_groups_that_are_under_way() -> None:
    async def run() -> None:
        house = House()
        waiting = house.take(0, 0)
        await turns()
        waiting.cancel()
        await house.groups.close()
        assert len(asyncio.all_tasks()) <= 2  # this one, and at most the cancelled step

    asyncio.run(run())


def request(name: str) -> GenerateRequest:
    return GenerateRequest(name, (1, 2), PrefixRef("cartridge/a", 1), Sampling(), 7)


class Generators:
    """Generators whose calls end when a test says so."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.go = asyncio.Event()

    async def __call__(
        self, requests: Sequence[GenerateRequest], replied: object = None, /
    ) -> list[Completion]:
        self.calls.append([r.id for r in requests])
        await self.go.wait()
        return [Completion(r.id, (5,), (-0.1,), (1,), "stop") for r in requests]


def test_requests_that_come_during_a_call_go_together_in_the_next() -> None:
    async def run() -> None:
        generators = Generators()
        joined = JoinedGenerate(generators)
        first = asyncio.create_task(joined([request("a"), request("b")]))
        await turns()
        later = [asyncio.create_task(joined([request(n)])) for n in "cde"]
        await turns()
        assert generators.calls == [["a", "b"]]
        generators.go.set()
        assert [c.request_id for c in await first] == ["a", "b"]
        assert [(await task)[0].request_id for task in later] == ["c", "d", "e"]
        assert generators.calls == [["a", "b"], ["c", "d", "e"]]

    asyncio.run(run())


def test_calls_beside_each_other_where_the_generators_take_them() -> None:
    async def run() -> None:
        generators = Generators()
        joined = JoinedGenerate(generators, at_once=2)
        tasks = []
        for name in "abc":
            tasks.append(asyncio.create_task(joined([request(name)])))
            await turns()
        assert generators.calls == [["a"], ["b"]]
        generators.go.set()
        await asyncio.gather(*tasks)
        assert generators.calls == [["a"], ["b"], ["c"]]

    asyncio.run(run())


def test_an_error_of_the_call_reaches_every_caller_and_the_next_call_works() -> None:
    async def run() -> None:
        fails = [True]

        async def generate(
            requests: Sequence[GenerateRequest], replied: object = None, /
        ) -> list[Completion]:
            if fails.pop() if fails else False:
                raise OSError("lost")
            return [Completion(r.id, (5,), (-0.1,), (1,), "stop") for r in requests]

        joined = JoinedGenerate(generate)
        both = await asyncio.gather(
            joined([request("a")]), joined([request("b")]), return_exceptions=True
        )
        assert [str(error) for error in both] == ["lost", "lost"]
        assert [c.request_id for c in await joined([request("c")])] == ["c"]

    asyncio.run(run())
