"""Test a pool's processes: hosts, ends and variables."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fake_mesh import house, run
from hypothesis import given
from hypothesis import strategies as st
from monarch.actor import Actor, concurrent_endpoint, this_host
from namespaces import cannot_make, told_by
from rooms.services.lifecycle_setup import settled

from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.services.pool.health import IN_SERVICE
from cartridge_forge.services.pool.hosts import LINK_ENVIRONMENT
from cartridge_forge.services.pool.service import Service

SCENARIO = Path(__file__).parents[3] / "scenarios/hosts_scenario.py"
SUSPECT, DEAD, BEAT = 1.0, 3.0, 0.2  # of the scenario's HealthSpec
# So that what is found out, and what ends by itself, is by our own heartbeat.
SLOW_MONARCH = {
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "20s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "20s",
    "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "60s",
}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    reason = cannot_make()
    if reason:
        pytest.skip(reason)
    told = told_by(SCENARIO, seconds=500, **LINK_ENVIRONMENT, **SLOW_MONARCH)
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


def test_a_worker_that_is_not_there_is_named(report: dict[str, Any]) -> None:
    assert "the worker at tcp://10.77.0.99:26600 was not attached within 1 s" in report["nobody"]


def test_replicas_are_spread_over_the_hosts(report: dict[str, Any]) -> None:
    assert report["start"] == {"host0": 2, "host1": 2}


def test_a_short_break_costs_no_replica(report: dict[str, Any]) -> None:
    assert report["blip_suspect_s"] >= SUSPECT - BEAT
    assert report["blip_same"], "the same processes went on"


@pytest.mark.parametrize("how", ["lost", "muted"])
def test_a_lost_host_is_doubted_given_up_and_replaced(report: dict[str, Any], how: str) -> None:
    """`muted`: the host hears everything, and what it says is lost."""
    loss = report[how]
    assert len(loss["had"]) == 2
    assert loss["suspect_s"] >= SUSPECT - 2 * BEAT
    assert DEAD - 2 * BEAT <= loss["dead_s"] <= loss["elsewhere_s"]


def test_the_pool_goes_on_with_the_other_host(report: dict[str, Any]) -> None:
    assert len(report["lost"]["host1"]) == 4
    assert report["lost"]["served_by"] == sorted(report["lost"]["host1"])


@pytest.mark.parametrize("how", ["healed", "unmuted"])
def test_replicas_move_to_a_host_that_is_back(report: dict[str, Any], how: str) -> None:
    assert 0 < report[how]["first_s"] <= report[how]["balanced_s"]


def test_with_all_hosts_lost_requests_wait_for_the_first_that_is_back(
    report: dict[str, Any],
) -> None:
    assert {"all_dead_s", "one_back_s", "both_back"} <= report.keys(), "each came about"


def test_a_host_that_is_back_serves_with_new_processes(report: dict[str, Any]) -> None:
    healed = report["healed"]
    assert healed["served_by"] == healed["pids"]
    assert len(healed["pids"]) == 4
    assert not set(healed["pids"]) & set(report["lost"]["had"])


def test_no_request_was_lost_or_answered_twice(report: dict[str, Any]) -> None:
    traffic, status = report["traffic"], report["status"]
    assert traffic["errors"] == []
    assert traffic["answered_once"] == traffic["asked"] == status["requests"] > 200
    assert status["failures"] == 0
    assert status["retries"] > 0, "what was in flight on a lost host was asked again elsewhere"


def test_moves_are_no_deaths(report: dict[str, Any]) -> None:
    """Of the role's budget of restarts only the replicas of lost hosts are taken."""
    lost = [e for e in report["events"] if e["event"] == "replica_lost"]
    moved = [e for e in report["events"] if e["event"] == "replica_moved"]
    # Two each: host 0 cut, host 1 muted, both cut (four), host 1 cut at the end.
    assert report["status"]["restarts"] == len(lost) == 10
    assert len(moved) == 6  # half of the pool, each of the three times that a host came back
    assert {e["reason"] for e in lost} == {"it was silent for 3 s"}


def test_the_end_is_bounded_while_a_host_is_lost(report: dict[str, Any]) -> None:
    assert "stop_s" in report


def test_what_runs_on_a_lost_host_ends_by_itself(report: dict[str, Any]) -> None:
    assert "last_end_s" in report


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


NAMES = ("TEAM_KEY", "AWS_SECRET_ACCESS_KEY", "OMP_NUM_THREADS")


class VariablesActor(Actor):
    """Return the names among NAMES that its process has."""

    @concurrent_endpoint
    async def ready(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def seen(self) -> list[str]:
        return [name for name in NAMES if name in os.environ]


def test_only_the_role_that_needs_a_key_has_it_and_takes_no_spare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "1")

    async def scenario() -> dict[str, list[str]]:
        service = await Service.of(
            this_host(), spares=1, variables={"asking": ("TEAM_KEY",)}, spawn_timeout_s=120.0
        )
        try:
            service.warm([1])
            pools = {
                role: service.spawn(VariablesActor, n=1, role=role, spec=RoleSpec(threads=1))
                for role in ("asking", "reading")
            }
            await service.ready()
            return {role: (await pool.fanout("seen"))[0] for role, pool in pools.items()}
        finally:
            await service.stop()

    seen = asyncio.run(scenario())
    assert seen == {"asking": ["TEAM_KEY", "OMP_NUM_THREADS"], "reading": ["OMP_NUM_THREADS"]}
