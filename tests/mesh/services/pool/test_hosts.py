"""A host that is lost and comes back, over real links: the pool goes on, and uses it again."""

import json
from pathlib import Path
from typing import Any

import pytest
from namespaces import cannot_make, told_by

from cartridge_forge.services.pool.hosts import LINK_ENVIRONMENT

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
