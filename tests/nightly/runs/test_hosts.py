"""Test runs over several hosts: lost, evicted, by TLS."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from mesh_scenario import status, told
from namespaces import FORGE, cannot_make, told_by
from small_run import ROOT, Finished, command, latest, rows, run_to_end, running, same_outcome

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


PATIENCE = 300.0
LONGER = 8.0  # than a run waits for its step without --grace
EVICTED_GRACE = (
    10.0  # of a worker: the controller asks each second whether it drains, on busy cores later
)
# A process that is held in the middle of a call, or starts on busy cores, is silent for long.
HEALTH = {"heartbeat_s": 0.5, "suspect_after_s": 60.0, "dead_after_s": 90.0}


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return min(int(trial.getsockname()[1]), 65000)


@contextmanager
def worker(port: int, grace: float = PATIENCE) -> Iterator[subprocess.Popen[bytes]]:
    address = f"tcp://127.0.0.1:{port}"
    words = [*FORGE, "worker", "--address", address, "--grace", str(grace)]
    process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.terminate()  # the second ends it at once
        process.wait(PATIENCE)


def on(*ports: int) -> dict[str, object]:
    return {"kind": "addresses", "addresses": [f"tcp://127.0.0.1:{port}" for port in ports]}


def generators(run: Path) -> dict[str, tuple[int, str]]:
    """The process and the host of each generator."""
    [pool] = [p for p in status(run)["pools"] if p["role"] == "generator"]
    return {r["name"]: (int(r["pid"]), r["host"]) for r in pool["replicas"]}


def steps(run: Path) -> list[int]:
    return [row["step"] for row in rows(run / "metrics.jsonl") if row["arm"] == "on_policy"]


def test_a_run_has_its_grace_for_the_step_in_progress(finished: Finished, tmp_path: Path) -> None:
    sets = {"train__checkpoint_every": 0, "health": HEALTH}
    with running(command(tmp_path, "--grace", str(PATIENCE), **sets), tmp_path) as run:
        path = run.wait_for("on_policy", 1)
        held, _ = generators(path)["generator[0]"]
        os.kill(held, signal.SIGSTOP)
        run.process.send_signal(signal.SIGTERM)
        time.sleep(LONGER)
        assert run.process.poll() is None
        os.kill(held, signal.SIGCONT)
        said, _ = run.process.communicate(timeout=PATIENCE)
        assert run.process.returncode == 143, said
        run.wait_until_gone(PATIENCE)
    newest = sorted((path / "checkpoints").glob("version-*"))[-1]
    assert newest.name == f"version-{steps(path)[-1]:06d}"
    done = run_to_end(command(tmp_path, "--resume", **sets))
    assert done.returncode == 0, done.stdout + done.stderr
    same_outcome(path, finished.path)


def test_the_only_host_of_a_run_leaves_and_comes_back(finished: Finished, tmp_path: Path) -> None:
    port = free_port()
    with ExitStack() as stack:
        first = stack.enter_context(worker(port))
        words = command(tmp_path, hosts=on(port), health=HEALTH, spawn_timeout_s=300)
        run = stack.enter_context(running(words, tmp_path))
        path = run.wait_for("on_policy", 2)
        first.send_signal(signal.SIGTERM)
        assert first.wait(PATIENCE) == 0
        stack.enter_context(worker(port))
        said, _ = run.process.communicate(timeout=PATIENCE)
        assert run.process.returncode == 0, said
    assert told(path, "host_drained")
    assert told(path, "replica_lost") == []
    same_outcome(path, finished.path)


def test_a_call_that_outlasts_a_worker_is_made_again_elsewhere(
    finished: Finished, tmp_path: Path
) -> None:
    ports = [free_port(), free_port()]
    with ExitStack() as stack:
        workers = {str(port): stack.enter_context(worker(port, EVICTED_GRACE)) for port in ports}
        words = command(tmp_path, hosts=on(*ports), health=HEALTH, spawn_timeout_s=300)
        run = stack.enter_context(running(words, tmp_path))
        path = run.wait_for("on_policy", 1)
        held, host = generators(path)["generator[0]"]
        os.kill(held, signal.SIGSTOP)
        leaving = workers[host.rpartition(":")[2]]
        leaving.send_signal(signal.SIGTERM)
        assert leaving.wait(PATIENCE) == 0
        said, _ = run.process.communicate(timeout=PATIENCE)
        assert run.process.returncode == 0, said
    assert told(path, "host_drained")
    same_outcome(path, finished.path)


TLS_SCENARIO = Path(__file__).parents[2] / "scenarios/tls_scenario.py"


@pytest.fixture(scope="module")
def tls_report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    reason = cannot_make()
    if reason:
        pytest.skip(reason)
    told = told_by(TLS_SCENARIO, str(tmp_path_factory.mktemp("runs")), seconds=850)
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


def test_the_roles_are_on_both_hosts(tls_report: dict[str, Any]) -> None:
    hosts = {host for name, host in tls_report["placed"].items() if name != "store[0]"}
    assert hosts == {"10.77.0.2:26600", "10.77.0.3:26600"}


def test_the_run_ends_with_the_numbers_of_one_without_tls(tls_report: dict[str, Any]) -> None:
    assert tls_report["local"]["code"] == 0, tls_report["local"]["output"]
    assert tls_report["tls"]["code"] == 0, tls_report["tls"]["output"]
    assert tls_report["tls"]["lost"] == []
    same_outcome(Path(tls_report["tls"]["path"]), Path(tls_report["local"]["path"]))


def test_every_port_beyond_loopback_was_tried(tls_report: dict[str, Any]) -> None:
    """A worker listens for Monarch at its address and at a port of its own, and for /hello."""
    for host in ("10.77.0.2", "10.77.0.3"):
        ports = [port for _, port in tls_report["ports"][host]]
        assert len(ports) == 4, "and for its relay"
        assert {26600, 26601} <= set(ports)
    assert len(tls_report["ports"]["10.77.0.1"]) == 4, "Monarch, the control plane, /metrics, relay"
    assert len(tls_report["clients"]) == 12


@pytest.mark.parametrize("client", ["plain", "no certificate", "of another authority"])
def test_a_stranger_gets_nothing_at_any_port(tls_report: dict[str, Any], client: str) -> None:
    got = {port: found[client] for port, found in tls_report["clients"].items()}
    assert got == dict.fromkeys(got, "nothing")


def test_a_member_of_the_mesh_is_let_in_at_every_port(tls_report: dict[str, Any]) -> None:
    got = {port: found["of the mesh"] for port, found in tls_report["clients"].items()}
    assert "nothing" not in got.values(), "else the strangers' tries would show nothing"


def test_a_strangers_monarch_is_not_attached(tls_report: dict[str, Any]) -> None:
    assert tls_report["monarch"] == {
        "plain": "refused", "of another authority": "refused", "of the mesh": "attached",
    }  # fmt: skip
