"""A run over two hosts with mutual TLS: it ends as a run on one host, and strangers get nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from namespaces import cannot_make, told_by
from small_run import same_outcome

SCENARIO = Path(__file__).parents[2] / "scenarios/tls_scenario.py"

pytestmark = [pytest.mark.timeout(900)]  # two runs, and patience at each port


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    reason = cannot_make()
    if reason:
        pytest.skip(reason)
    told = told_by(SCENARIO, str(tmp_path_factory.mktemp("runs")), seconds=850)
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


def test_the_roles_are_on_both_hosts(report: dict[str, Any]) -> None:
    hosts = {host for name, host in report["placed"].items() if name != "store[0]"}
    assert hosts == {"10.77.0.2:26600", "10.77.0.3:26600"}


def test_the_run_ends_with_the_numbers_of_one_without_tls(report: dict[str, Any]) -> None:
    assert report["local"]["code"] == 0, report["local"]["output"]
    assert report["tls"]["code"] == 0, report["tls"]["output"]
    assert report["tls"]["lost"] == []
    same_outcome(Path(report["tls"]["path"]), Path(report["local"]["path"]))


def test_every_port_beyond_loopback_was_tried(report: dict[str, Any]) -> None:
    """A worker listens for Monarch at its address and at a port of its own, and for /hello."""
    for host in ("10.77.0.2", "10.77.0.3"):
        ports = [port for _, port in report["ports"][host]]
        assert len(ports) == 4, "and for its relay"
        assert {26600, 26601} <= set(ports)
    assert len(report["ports"]["10.77.0.1"]) == 4, "Monarch, the control plane, /metrics, relay"
    assert len(report["clients"]) == 12


@pytest.mark.parametrize("client", ["plain", "no certificate", "of another authority"])
def test_a_stranger_gets_nothing_at_any_port(report: dict[str, Any], client: str) -> None:
    got = {port: found[client] for port, found in report["clients"].items()}
    assert got == dict.fromkeys(got, "nothing")


def test_a_member_of_the_mesh_is_let_in_at_every_port(report: dict[str, Any]) -> None:
    got = {port: found["of the mesh"] for port, found in report["clients"].items()}
    assert "nothing" not in got.values(), "else the strangers' tries would show nothing"


def test_a_strangers_monarch_is_not_attached(report: dict[str, Any]) -> None:
    assert report["monarch"] == {
        "plain": "refused", "of another authority": "refused", "of the mesh": "attached",
    }  # fmt: skip
