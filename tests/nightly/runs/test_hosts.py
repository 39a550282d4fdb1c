"""Runs over several hosts, over real links: one cut, one worker told to end, one run told to."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from namespaces import cannot_make, told_by
from small_run import command, latest, rows, run_to_end, running, same_outcome

from cartridge_forge.plugins.cluster.hosts.handshake import WorkerInfo, WorkerInfoServer
from cartridge_forge.services.pool.hosts import versions

SCENARIO = Path(__file__).parents[2] / "scenarios/mesh_scenario.py"
GRACE = 25.0

pytestmark = [pytest.mark.timeout(900)]  # four runs: two minutes on quiet cores


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    reason = cannot_make()
    if reason:
        pytest.skip(reason)
    # What a start that was under way on a lost host leaves there, Monarch ends.
    wait = {"HYPERACTOR_MESH_ORPHAN_TIMEOUT": "10s"}
    told = told_by(SCENARIO, str(tmp_path_factory.mktemp("runs")), seconds=850, **wait)
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


def events(report: dict[str, Any], name: str, event: str) -> list[dict[str, Any]]:
    return [e for e in report[name]["events"] if e["event"] == event]


def test_the_roles_are_spread_and_the_store_is_beside_the_controller(
    report: dict[str, Any],
) -> None:
    hosts = dict(report["cut"]["placed"])
    assert not hosts.pop("store[0]").startswith("10.77.")
    assert set(hosts.values()) == {f"10.77.0.{n}:26600" for n in (2, 3, 4)}


@pytest.mark.parametrize("name", ["cut", "drained"])
def test_a_run_that_loses_a_host_ends_as_one_that_does_not(
    report: dict[str, Any], name: str
) -> None:
    assert report["local"]["code"] == 0, report["local"]["output"]
    assert report[name]["code"] == 0, report[name]["output"]
    same_outcome(Path(report[name]["path"]), Path(report["local"]["path"]))


def test_what_was_on_the_lost_host_came_back_elsewhere(report: dict[str, Any]) -> None:
    lost = {e["replica"] for e in events(report, "cut", "replica_lost")}
    assert "generator[0]" in lost
    assert lost <= {e["replica"] for e in events(report, "cut", "replica_back")}
    [event] = events(report, "cut", "host_lost")
    assert event["host"] == f"10.77.0.{report['cut']['host'] + 2}:26600"


def test_a_worker_that_is_told_to_end_is_drained_first(report: dict[str, Any]) -> None:
    drained = report["drained"]
    assert drained["worker"] == 0
    host = f"10.77.0.{drained['host'] + 2}:26600"
    assert [e["host"] for e in events(report, "drained", "host_drained")] == [host]
    assert "trainer[0]" in {e["replica"] for e in events(report, "drained", "replica_moved")}
    assert events(report, "drained", "replica_lost") == []
    joined = [e["host"] for e in events(report, "drained", "host_joined")]
    assert joined.count(host) == 2, "started again at the same address, it was used again"


def test_a_run_that_is_told_to_end_leaves_empty_workers(report: dict[str, Any]) -> None:
    assert report["stopped"]["code"] == 143, report["stopped"]["output"]
    assert events(report, "stopped", "checkpoint")


def test_idle_workers_end_at_once(report: dict[str, Any]) -> None:
    assert report["idle"] == [0, 0, 0]


def test_a_worker_of_another_version_ends_the_run_at_its_start(tmp_path: Path) -> None:
    other = {**versions(), "torchmonarch": "0.6.9"}
    with WorkerInfoServer("127.0.0.1", 0, lambda: WorkerInfo(other, "a", False, "")) as server:
        address = f"tcp://127.0.0.1:{server.port - 1}"
        done = run_to_end(command(tmp_path, hosts={"kind": "addresses", "addresses": [address]}))
    assert done.returncode == 1
    ours = versions()["torchmonarch"]
    assert (
        f"error: the worker at {address} has torchmonarch 0.6.9 where this side has {ours}; "
        "install the same versions on both" in done.stderr
    )


def test_a_run_that_waits_for_its_hosts_can_be_told_to_end(tmp_path: Path) -> None:
    nobody = {"kind": "addresses", "addresses": ["tcp://127.0.0.1:1"]}
    with running(command(tmp_path, hosts=nobody), tmp_path) as run:
        deadline = time.monotonic() + 60.0
        events = tmp_path / "longhealth" / "latest" / "events.jsonl"
        while not events.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        run.process.send_signal(signal.SIGTERM)
        output, _ = run.process.communicate(timeout=60)
        assert run.process.returncode == 143, output
        run.wait_until_gone(10.0)
    last = rows(latest(tmp_path) / "events.jsonl")[-1]
    assert (last["event"], last["status"]) == ("finished", "stopped")
