"""Runs on a real Slurm: slurmctld, and a slurmd in each of two network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_run import ROOT, rows, same_outcome

SLURM = ROOT / ".venv/slurm"
SCENARIO = ROOT / "tests/scenarios/slurm_runs.py"
STEPS = 20

pytestmark = [pytest.mark.timeout(3000)]  # eight runs


def cannot_start() -> str:
    """Why Slurm cannot be started here; "" where it can."""
    if not SLURM.is_dir():
        return "there is no .venv/slurm: make install-slurm, where there is apt"
    if os.geteuid() != 0:
        return "a real Slurm in namespaces needs root"
    trial = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "ip", "link"]
    done = subprocess.run(trial, capture_output=True, text=True, timeout=60)
    return f"namespaces cannot be made here: {done.stderr.strip()}" if done.returncode else ""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    reason = cannot_start()
    if reason:
        pytest.skip(reason)
    home = tmp_path_factory.mktemp("slurm")
    done = subprocess.run(
        [ROOT / "tests/clusters/slurm.sh", SLURM, "2", sys.executable, SCENARIO, home],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=2900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def as_on_one_host(report: dict[str, Any], name: str) -> None:
    """The run has ended with the results of one without Slurm, and left no job."""
    assert report["local"]["code"] == 0, report["local"]["said"]
    assert report[name]["code"] == 0, report[name]["said"]
    path = Path(report[name]["path"])
    assert [row["step"] for row in rows(path / "metrics.jsonl")] == [*range(1, STEPS + 1)]
    same_outcome(path, Path(report["local"]["path"]))
    assert report[name]["jobs"] == 1
    assert report[name]["state"] == "CANCELLED", "by the run, at its end"


def events(report: dict[str, Any], name: str, event: str) -> list[dict[str, Any]]:
    return [e for e in report[name]["events"] if e["event"] == event]


def test_a_run_on_both_nodes_which_refuses_to_be_requeued(report: dict[str, Any]) -> None:
    as_on_one_host(report, "whole")
    assert {e["host"] for e in events(report, "whole", "host_joined")} == {"host0", "host1"}
    assert "Requested operation is presently disabled" in report["requeue"]["answer"]


def test_a_node_that_is_lost_does_not_end_the_run(report: dict[str, Any]) -> None:
    as_on_one_host(report, "node")
    lost = {e["replica"] for e in events(report, "node", "replica_lost")}
    assert lost
    assert lost <= {e["replica"] for e in events(report, "node", "replica_back")}


@pytest.mark.parametrize("name", ["cancelled", "paused"])
def test_a_job_that_is_cancelled_ends_the_run_which_is_resumed(
    report: dict[str, Any], name: str
) -> None:
    end = report[name]
    assert end["code"] == 1, end["said"]
    assert " ended: CANCELLED" in end["said"]
    assert "go on with --resume, which submits a new one" in end["said"]
    assert "Traceback" not in end["said"]
    assert end["jobs"] == 1, "one job was submitted"
    as_on_one_host(report, f"{name} again")


def test_a_requeue_that_the_user_allows_ends_the_run(report: dict[str, Any]) -> None:
    end = report["requeued"]
    assert end["code"] == 1, end["said"]
    assert " was put back into the queue: PENDING" in end["said"]
    assert (end["jobs"], end["state"]) == (1, "CANCELLED")
