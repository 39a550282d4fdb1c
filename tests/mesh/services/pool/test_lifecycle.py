"""The lives of replicas: a real service and real pools over processes that are none."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from fake_mesh import house, run
from hypothesis import given
from hypothesis import strategies as st
from rooms.services.lifecycle_setup import settled

from cartridge_forge.services.pool.health import IN_SERVICE

times = st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.7, 1.5, 3.0, 6.0])

events = st.one_of(
    st.tuples(st.just("request"), st.sampled_from([0.0, 0.05, 0.5, 2.5])),
    st.tuples(st.just("update"), st.just(0)),
    st.tuples(st.just("scale"), st.integers(1, 4)),
    st.tuples(st.just("die"), st.integers(0, 3)),
    st.tuples(st.just("stop"), st.integers(0, 3)),
    st.tuples(st.just("go on"), st.integers(0, 3)),
)


@given(schedule=st.lists(st.tuples(times, events), min_size=5, max_size=40))
def test_whatever_happens_every_request_is_answered_once_and_by_who_is_current(
    schedule: list[tuple[float, tuple[str, Any]]],
) -> None:
    answers: Counter[int] = Counter()
    behind: list[str] = []

    async def scenario() -> None:
        h = house(call_timeout_s=100.0)
        pool = await settled(h, n=2, attempts=50, restarts=1000)
        told = -1  # the newest version that `update` has returned from

        async def request(item: int, seconds: float) -> None:
            at_least = told
            answered, version = await pool.route("work", item, seconds)
            assert answered == item
            assert version >= at_least, f"request {item} was answered by version {version}"
            answers[item] += 1

        async def update(version: int) -> None:
            nonlocal told
            await pool.update("cartridge", version, "load", version)
            told = max(told, version)

        def look() -> None:
            for replica in pool.replicas:
                if replica.state == "healthy" and replica.version < told:
                    behind.append(f"{replica.name} serves {replica.version}, and {told} was told")
                if replica.state in IN_SERVICE:
                    assert replica.process.actor.version >= replica.version

        pool_changed = pool.changed
        pool.changed = lambda: (look(), pool_changed())  # type: ignore[method-assign,func-returns-value]
        work: list[asyncio.Task[None]] = []
        for number, (seconds, (what, which)) in enumerate(schedule):
            await asyncio.sleep(seconds)
            look()
            process = None
            if what in ("die", "stop", "go on") and which < len(pool.replicas):
                process = pool.replicas[which].process
            if what == "request":
                work.append(asyncio.create_task(request(number, which)))
            elif what == "update":
                work.append(asyncio.create_task(update(number)))
            elif what == "scale":
                pool.scale(which)
            elif process is not None:
                {"die": process.die, "stop": process.stop, "go on": process.go_on}[what]()
        for process in h.processes.living:  # a drained one that is stopped would be waited for
            process.go_on()
        await asyncio.gather(*work)
        await pool.settled(60.0)
        look()
        assert not behind, behind
        assert not h.service.failure.done()
        assert len(h.processes.living) == pool.target
        assert pool.in_flight == {}
        assert [(r.ongoing, len(r.calls)) for r in pool.replicas] == [(0, 0)] * pool.target
        assert {r.version for r in pool.replicas} == {max([told])}
        status = pool.status()
        requests = [n for n, (_, (what, _)) in enumerate(schedule) if what == "request"]
        assert answers == Counter(requests)
        assert (status.requests, status.failures) == (len(requests), 0)
        ended = Counter(s.facts["outcome"] for s in h.spans if "request" in s.facts)
        assert ended["ok"] == len(requests)
        assert set(ended) <= {"ok", "lost"}
        await h.service.stop()

    run(scenario())
