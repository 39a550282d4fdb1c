"""A real run as Prometheus, Perfetto and the dashboard see it."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus import Prometheus, dashboard_queries, prometheus, promtool
from small_run import Running, command, running
from trace_check import read_trace

pytestmark = [pytest.mark.prometheus]

WAIT_SECONDS = 120.0
# Metric -> why a sound run has no sample of it.
EMPTY = {
    "forge_replica_recovery_seconds": "no replica died",
    **dict.fromkeys(
        ("forge_teacher_", '"episodes/', '~"episodes/', '~".+/'),
        "it has no episodes",
    ),
}


def endpoints(path: Path) -> dict[str, Any]:
    """The addresses of the run in `path`, once it has written them."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        if (path / "endpoints.json").is_file():
            found: dict[str, Any] = json.loads((path / "endpoints.json").read_text())
            return found
        time.sleep(0.05)
    raise AssertionError(f"no endpoints.json in {path} within {WAIT_SECONDS:g} s")


def stop(run: Running) -> str:
    """Ctrl-C; returns what the run printed."""
    os.killpg(run.process.pid, signal.SIGINT)
    said, _ = run.process.communicate(timeout=WAIT_SECONDS)
    run.wait_until_gone(WAIT_SECONDS)
    return said


def unanswered(server: Prometheus, queries: list[str]) -> list[str]:
    """The queries without a result, after time enough for every second's status and two scrapes."""
    deadline = time.monotonic() + WAIT_SECONDS
    left = queries
    while left and time.monotonic() < deadline:
        left = [query for query in left if not server.query(query)]
        time.sleep(0.5 if left else 0)
    return left


def test_a_running_mesh_is_seen(tmp_path: Path) -> None:
    # Far more steps than it is given time for: it is stopped when everything was looked at.
    words = command(tmp_path, train__steps=5000, evaluate__arms=["none", "on_policy"],
                    roles__generator__replicas=1)  # fmt: skip
    with running(words, tmp_path) as run:
        path = run.wait_for("on_policy", 3)  # its probe is the first accuracy in training
        url = endpoints(path)["metrics"]
        with urllib.request.urlopen(url, timeout=5) as answer:
            checked = promtool("check", "metrics", text=answer.read().decode())
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
        target = url.removeprefix("http://").removesuffix("/metrics")
        with prometheus(tmp_path, target) as server:
            queries = [q for q in dashboard_queries() if not any(name in q for name in EMPTY)]
            assert unanswered(server, queries) == []
            (info,) = server.query("forge_run_info")
            assert (info["metric"]["run"], info["metric"]["mesh"]) == (path.name, "longhealth")
            firing = server.query('ALERTS{alertstate="firing"}')
            assert firing == []
        stop(run)
    trace = read_trace(path / "trace.json")
    assert {"controller", "generator[0]", "doc_teacher[0]", "trainer[0]"} <= set(trace.slices)
    phases = {event["name"] for event in trace.slices["controller"]}
    assert {"rollout", "score", "train", "publish"} <= phases
    assert any("version" in event["args"] for event in trace.slices["generator[0]"])
