"""One heartbeat message a remote host and period, over real links, and what is found by it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from namespaces import ALONE, cannot_make

from cartridge_forge.services.pool.hosts import LINK_ENVIRONMENT

SCENARIO = Path(__file__).parents[4] / "scenarios/heartbeats_scenario.py"
# So that what is found is found by our own heartbeats.
SLOW_MONARCH = {
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "60s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "60s",
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "600s",
    "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "600s",
}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    reason = cannot_make()
    if reason:
        pytest.skip(reason)
    done = subprocess.run(
        [*ALONE, sys.executable, str(SCENARIO)],
        env={**os.environ, **LINK_ENVIRONMENT, **SLOW_MONARCH},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_host_of_four_processes_gets_one_message_in_place_of_four(report: dict[str, Any]) -> None:
    assert report["processes"] == [4, 4]
    assert report["batched"]["messages"] == [1]
    assert report["single"]["messages"] == [4]


def test_one_that_hangs_is_suspect_and_alone(report: dict[str, Any]) -> None:
    hung = report["hung"]
    assert (hung["suspect"], hung["messages"], hung["lost"]) == (1, [1], [])


def test_one_that_is_killed_is_told_of(report: dict[str, Any]) -> None:
    """It is not found by its silence, which has another reason."""
    killed = report["killed"]
    assert killed["lost"] == [f"its process {killed['pid']} has ended"]


def test_with_the_process_that_asks_the_others_nobody_is_lost(report: dict[str, Any]) -> None:
    assert report["after"]["lost"] == report["killed"]["lost"]
    assert report["after"]["messages"] == [1]
