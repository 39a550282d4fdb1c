"""Pools: order kept however work is shared, every failure named, nothing waited for without end."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.errors import ForgeError, PublishError, RunError, StaleTokenError
from services.pool import Pool, bounded, gather


class RemoteError(Exception):
    """What Monarch raises for an exception inside an actor: it carries that one."""

    def __init__(self, exception: BaseException) -> None:
        super().__init__(f"A remote actor call has failed.\n Traceback ...\n{exception!r}\n")
        self.exception = exception


class MeshError(Exception):
    """What Monarch raises for a death: nothing inside."""


class Endpoint:
    def __init__(self, answer: Callable[..., Awaitable[Any]]) -> None:
        self.call_one = answer


class Replica:
    """An actor handle whose endpoints are the given coroutine functions."""

    def __init__(self, **endpoints: Callable[..., Awaitable[Any]]) -> None:
        for name, answer in endpoints.items():
            setattr(self, name, Endpoint(answer))


def raising(error: BaseException) -> Callable[..., Awaitable[Any]]:
    async def answer(*_: Any) -> Any:
        await asyncio.sleep(0)
        raise error

    return answer


async def double(x: int) -> int:
    return 2 * x


def test_a_call_reaches_one_replica() -> None:
    async def third(x: int) -> int:
        return 3 * x

    pool = Pool("generator", [Replica(go=double), Replica(go=third)], 1.0)
    assert len(pool) == 2
    assert asyncio.run(pool.call(0, "go", 7)) == 14
    assert asyncio.run(pool.call(1, "go", 7)) == 21
    assert asyncio.run(pool.fanout("go", 5)) == [10, 15]


@settings(max_examples=100, deadline=None)
@given(
    replicas=st.integers(1, 7),
    items=st.lists(st.integers(), max_size=20),
    delays=st.lists(st.integers(0, 5), min_size=7, max_size=7),
)
def test_split_shares_everything_once_and_keeps_order(
    replicas: int, items: list[int], delays: list[int]
) -> None:
    shares: dict[int, list[int]] = {}

    async def work(replica: int, share: Sequence[int]) -> list[str]:
        for _ in range(delays[replica]):  # replicas answer in any order
            await asyncio.sleep(0)
        shares[replica] = list(share)
        return [f"{replica}:{item}" for item in share]

    pool = Pool("generator", [Replica()] * replicas, 1.0)
    answers = asyncio.run(pool.split(items, work))
    assert answers == [f"{i % min(replicas, len(items))}:{item}" for i, item in enumerate(items)]
    assert set(shares) == set(range(min(replicas, len(items)))), "nobody is given nothing"
    sizes = [len(share) for share in shares.values()]
    assert sum(sizes) == len(items)
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_splits_and_fanouts_run_side_by_side() -> None:
    """Two replicas that each wait for the other: one after the other would never end."""

    async def meet() -> list[Any]:
        both = asyncio.Barrier(2)

        async def wait(*_: Any) -> str:
            await both.wait()
            return "met"

        pool = Pool("generator", [Replica(go=wait)] * 2, 1.0)

        async def work(replica: int, share: Sequence[int]) -> list[Any]:
            return [await pool.call(replica, "go") for _ in share]

        return [await pool.fanout("go"), await pool.split([1, 2], work)]

    assert asyncio.run(meet()) == [["met", "met"], ["met", "met"]]


@pytest.mark.parametrize(
    "error", [StaleTokenError("tokens of version 3"), PublishError("used twice"), RunError("no")]
)
def test_our_own_errors_come_out_as_themselves(error: ForgeError) -> None:
    pool = Pool("trainer", [Replica(step=raising(RemoteError(error)))], 1.0)
    with pytest.raises(ForgeError) as caught:
        asyncio.run(pool.call(0, "step"))
    assert caught.value is error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RemoteError(KeyError("kv")), "KeyError: 'kv'"),
        (RemoteError(ValueError("shape\n  [3, 4] is not\n  [4, 3]\n")), "ValueError: [4, 3]"),
        (RemoteError(ValueError()), "ValueError: no message"),
        (MeshError("the mesh is dead:\n\nproc exited with -9\n"), "MeshError: proc exited with -9"),
        (MeshError(""), "MeshError: no message"),
    ],
)
def test_other_errors_name_role_replica_and_method(error: Exception, reason: str) -> None:
    pool = Pool("generator", [Replica(load=double), Replica(load=raising(error))], 1.0)
    with pytest.raises(RunError) as caught:
        asyncio.run(pool.call(1, "load"))
    assert str(caught.value) == f"generator[1].load failed: {reason}"
    assert caught.value.__cause__ is error


def test_a_call_that_fails_at_once_is_named_too() -> None:
    """A mesh that is known to be dead refuses the call itself, before there is a future."""

    def refuse(*_: Any) -> Any:
        raise MeshError("mesh generator1 is stopped")

    pool = Pool("generator", [Replica(load=refuse)], 1.0)
    with pytest.raises(RunError) as caught:
        asyncio.run(pool.call(0, "load"))
    assert str(caught.value) == "generator[0].load failed: MeshError: mesh generator1 is stopped"


def test_silence_ends() -> None:
    ended: list[str] = []

    async def never(*_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    pool = Pool("doc_teacher", [Replica(score=never)], 0.02)
    with pytest.raises(RunError) as caught:
        asyncio.run(pool.call(0, "score"))
    assert str(caught.value) == (
        "doc_teacher[0].score did not answer within 0.02 s; raise call_timeout_s in the mesh file "
        "if the work is really that long"
    )
    assert ended == ["cancelled"]


def test_a_future_that_is_no_coroutine_is_bounded_too() -> None:
    """Monarch's futures have `__await__` alone."""

    class Future:
        def __await__(self) -> Any:
            yield from asyncio.sleep(0).__await__()
            return 11

    assert asyncio.run(bounded(Future(), 1.0, "ready")) == 11


def test_being_cancelled_is_not_a_failure() -> None:
    async def scenario() -> None:
        task = asyncio.create_task(bounded(asyncio.Event().wait(), 5.0, "ready"))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scenario())


def test_gather_raises_the_first_failure_after_all_have_ended() -> None:
    ended: list[str] = []

    async def scenario() -> None:
        async def end(name: str, ticks: int, error: Exception | None) -> str:
            for _ in range(ticks):
                await asyncio.sleep(0)
            ended.append(name)
            if error:
                raise error
            return name

        calls = [
            end("well", 3, None),
            end("second", 6, RunError("the first by place")),
            end("third", 0, KeyError("the first by time")),
            end("last", 9, None),
        ]
        await gather(calls)

    with pytest.raises(RunError, match=r"^the first by place$"):
        asyncio.run(scenario())
    assert ended == ["third", "well", "second", "last"]


def test_gather_of_nothing() -> None:
    assert asyncio.run(gather([])) == []


def test_a_fanout_in_which_one_fails_waits_for_the_others() -> None:
    loaded: list[str] = []

    async def slow(name: str) -> None:
        await asyncio.sleep(0.01)
        loaded.append(name)

    dead = raising(MeshError("proc exited with -9"))
    pool = Pool("generator", [Replica(load=dead), Replica(load=slow)], 1.0)
    with pytest.raises(RunError, match=r"^generator\[0\]\.load failed: MeshError: proc exited"):
        asyncio.run(pool.fanout("load", "snapshot"))
    assert loaded == ["snapshot"]
