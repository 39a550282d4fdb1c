"""A run on a real control plane (etcd, kube-apiserver, kube-controller-manager), whose pods are
real processes in network namespaces: applied as rendered, scaled, rolled to another image, and
disturbed. tests/clusters/small_cluster.py says what of a cluster is played."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from namespaces import CLIENT, cannot_make
from small_run import ROOT, rows

BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager")
# In namespaces of its own, so that all its processes end with it.
APART = ("unshare", "--mount", "--net", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child")
START = (
    "ip link set lo up && ip link add bridge type bridge && ip link set bridge up && "
    f'ip addr add {CLIENT}/24 dev bridge && hostname login && exec "$0" "$@"'
)

pytestmark = [pytest.mark.timeout(1800)]  # two runs: four minutes on two busy cores


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, [os.environ.get("FORGE_KUBERNETES"), os.environ["PATH"]]))
    missing = [name for name in BINARIES if shutil.which(name, path=path) is None]
    reason = cannot_make()
    if missing:
        reason = (
            f"{', '.join(missing)} (Kubernetes 1.31 or newer) are neither on PATH nor in the "
            "folders of $FORGE_KUBERNETES: docs/how-to/deploy.md says where they come from"
        )
    if os.geteuid():
        reason = "a real control plane is tested as root: pods get namespaces and mounts"
    if reason:
        pytest.skip(reason)
    homes = ("", "tests", "tests/fakes", "tests/setups", "tests/scenarios", "tests/clusters")
    done = subprocess.run(
        [*APART, "bash", "-c", START, ROOT / "tests/fakes/kube_apiserver.sh", sys.executable,
         ROOT / "tests/scenarios/control_plane.py", tmp_path_factory.mktemp("runs")],
        env={**os.environ, "PATH": path, "FORGE_KUBE_SPACE": "forge-longhealth",
             "FORGE_KUBE_CONTROLLERS": "1", "FORGE_KUBE_ADDRESS": CLIENT,
             "PYTHONPATH": os.pathsep.join(str(ROOT / home) for home in homes)},
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1750,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def events(report: dict[str, Any], event: str) -> list[dict[str, Any]]:
    return [e for e in report["events"] if e["event"] == event]


def test_the_run_ends_and_until_it_was_scaled_it_was_as_one_on_this_host(
    report: dict[str, Any],
) -> None:
    """Later on two generators share the prompts, and a row's last digits depend on its batch."""
    assert report["local"]["code"] == 0, report["local"]["output"]
    assert report["job"].get("succeeded") == 1, f"{report['job']}\n{report['log'][-4000:]}"
    found, local = (
        rows(Path(p) / "metrics.jsonl") for p in (report["path"], report["local"]["path"])
    )
    assert [row["step"] for row in found] == [row["step"] for row in local] == list(range(1, 61))
    assert report["scaled_at"] >= 1
    assert found[: report["scaled_at"]] == local[: report["scaled_at"]]


def test_all_that_is_rendered_was_taken_strictly_and_nothing_of_the_cluster_failed(
    report: dict[str, Any],
) -> None:
    assert report["objects"] > 15
    assert report["errors"] == []


def test_a_role_was_scaled_by_the_controller_s_own_account(report: dict[str, Any]) -> None:
    assert {"scale 1 to 4", "scale 4 to 2"} <= set(report["seconds"])
    assert report["sets"]["generator"]["replicas"] == 2


def test_an_upgrade_drains_each_pod_and_the_run_goes_on(report: dict[str, Any]) -> None:
    assert report["images"] == ["cartridge-forge:0.1.1-cpu"]
    drained = {e["host"] for e in events(report, "host_drained")}
    assert {"generator-0", "generator-1", "docteacher-0", "trainer-0"} <= drained


def test_a_budget_allows_one_eviction_of_a_pool_and_none_of_the_controller(
    report: dict[str, Any],
) -> None:
    allowed, *refused = report["evictions"]
    assert allowed == ""
    for said in refused:
        assert "429" in said
        assert "disruption budget" in said


def test_a_run_goes_on_without_a_lost_node(report: dict[str, Any]) -> None:
    assert report["lost"] == ["generator-1"]
    assert "steps without it" in report["seconds"]
    assert report["conditions"] == {"generator-1": ["DeletionByTaintManager"]}
    assert "node deleted" in report["seconds"]  # and with it came another pod


def test_the_controllers_job_makes_another_pod_that_continues(report: dict[str, Any]) -> None:
    assert report["resumed"]["from"] != report["resumed"]["to"]
    starts = events(report, "run_started")
    assert [start["resumed"] for start in starts] == [False, True]


def test_the_status_alone_says_how_it_stands(report: dict[str, Any]) -> None:
    """As `forge status` prints it: a word per replica, and why a pod is not there."""
    said = report["diagnoses"]
    assert "4 healthy" in said["scale 1 to 4"]
    assert "dead" in said["upgrade"]
    assert "trainer-0: " in said["pod deleted"]
    assert "generator-1: NodeLost: " in said["node given up"]
    assert "delete the Node, or the pod with --force" in " ".join(said["node given up"].split())
