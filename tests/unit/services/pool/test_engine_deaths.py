"""Engines that die of a request: which requests are tried again, where, and how often."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_mesh import House, house, run

from cartridge_forge.protocols.errors import EngineDied, EngineKilledError, RunError
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.services.pool.pool import Pool

LATE = 0.3


class Batching:
    """Works on all of its requests together. Its engine dies 0.1 s after "poison" has come: a pass
    over that one, and those "beside" it, has failed. "late" ones are told so later than others,
    "mute" ones never."""

    def __init__(self) -> None:
        self.died = asyncio.Event()

    async def ready(self) -> int:
        return 1

    async def work(self, item: str, seconds: float = 1.0) -> str:
        if "poison" in item:
            await asyncio.sleep(0.1)
            self.died.set()
        try:
            async with asyncio.timeout(seconds):
                await self.died.wait()
        except TimeoutError:
            return item
        if "late" in item:
            await asyncio.sleep(LATE)
        if "mute" in item:
            await asyncio.sleep(1e6)
        raise EngineDied("the engine died: no memory", suspect="poison" in item or "beside" in item)


async def settled(h: House, **spec: Any) -> Pool:
    pool = h.service.spawn(Batching, role="worker", spec=RoleSpec(**spec))
    await h.service.ready()
    return pool


async def healthy_counts(pool: Pool, counts: set[int]) -> None:
    while True:
        counts.add(sum(r.life.takes_requests for r in pool.replicas))
        await asyncio.sleep(0.01)


def names(h: House) -> list[str]:
    return [name for name, _ in h.notes]


@pytest.mark.parametrize("poison", ["poison", "late poison"])
def test_a_request_that_kills_engines_is_failed_after_the_second(poison: str) -> None:
    """All others are answered, and one replica serves throughout: the request is not tried on the
    last one that does. No budget of restarts is needed for it."""

    async def scenario() -> None:
        h = house()
        pool = await settled(h, replicas=2, restarts=0)
        counts: set[int] = set()
        counting = asyncio.create_task(healthy_counts(pool, counts))
        others = [f"other {i}" for i in range(4)] + ["beside 1", "beside 2"]
        asked = [asyncio.create_task(pool.route("work", item)) for item in others]
        with pytest.raises(EngineKilledError) as killed:
            await pool.route("work", poison)
        assert str(killed.value) == (
            "worker.work is not tried again: 2 engines in turn died in a step that was over it, "
            "last: the engine died: no memory; send something shorter or simpler, or look for the "
            "cause in the log of the replicas"
        )
        assert await asyncio.gather(*asked) == others
        assert await pool.route("work", "other 4") == "other 4"
        await pool.settled(5.0)
        counting.cancel()
        assert counts == {1, 2}
        assert names(h) == ["replica_lost", "replica_back"] * 2
        assert {f["cause"] for name, f in h.notes if name == "replica_lost"} == {"engine"}
        status = pool.status()
        assert (status.engine_deaths, status.restarts, status.failures) == (2, 2, 1)
        assert not h.service.failure.done()
        await h.service.stop()

    run(scenario())


def test_the_only_replica_is_tried_twice() -> None:
    async def scenario() -> None:
        h = house()
        pool = await settled(h, replicas=1, restarts=0)
        other = asyncio.create_task(pool.route("work", "other"))
        with pytest.raises(EngineKilledError):
            await pool.route("work", "poison")
        assert await other == "other"
        assert pool.status().engine_deaths == 2
        await h.service.stop()

    run(scenario())


def test_a_request_outside_the_step_that_failed_is_no_suspect() -> None:
    """It sees three engines die, of others' doing, and is answered by the fourth."""

    async def scenario() -> None:
        h = house()
        pool = await settled(h, replicas=1, restarts=0)
        other = asyncio.create_task(pool.route("work", "other", 2.0))
        killed = await asyncio.gather(
            *(pool.route("work", f"poison {i}") for i in range(2)), return_exceptions=True
        )
        assert [type(error) for error in killed] == [EngineKilledError] * 2
        assert await other == "other"
        assert pool.status().engine_deaths == 3  # of both, then of each alone
        await h.service.stop()

    run(scenario())


def test_a_reply_that_does_not_come_is_not_waited_for() -> None:
    """A process without memory may not even tell that its engine died."""

    async def scenario() -> None:
        h = house()
        pool = await settled(h, replicas=2)
        asked = [asyncio.create_task(pool.route("work", f"mute {i}")) for i in range(3)]
        with pytest.raises(EngineKilledError):
            await pool.route("work", "poison")
        async with asyncio.timeout(10):
            assert await asyncio.gather(*asked) == ["mute 0", "mute 1", "mute 2"]
        await h.service.stop()

    run(scenario())


def test_a_process_that_dies_is_still_counted() -> None:
    async def scenario() -> None:
        h = house()
        pool = await settled(h, replicas=1, restarts=0)
        asked = asyncio.create_task(pool.route("work", "other"))
        await asyncio.sleep(0.1)
        pool.replicas[0].process.die()  # type: ignore[union-attr]
        with pytest.raises(RunError, match=r"roles.worker.restarts \(0\) are used up"):
            await asked
        assert [f["cause"] for name, f in h.notes if name == "replica_lost"] == ["process"]
        assert pool.status().engine_deaths == 0
        await h.service.stop()

    run(scenario())
