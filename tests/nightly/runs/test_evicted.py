"""Runs and workers that are told to leave, as a cloud tells one of its spot machines: SIGTERM in
the middle of a step, and SIGKILL after a grace. No step is lost, and none is trained twice."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from mesh_scenario import status, told
from namespaces import FORGE
from small_run import (
    ROOT,
    Finished,
    command,
    rows,
    run_to_end,
    running,
    same_outcome,
)

pytestmark = [pytest.mark.timeout(900)]  # two runs at most

PATIENCE = 300.0
LONGER = 8.0  # than a run waits for its step without --grace
GRACE = 10.0  # of a worker: the controller asks each second whether it drains, on busy cores later
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
        workers = {str(port): stack.enter_context(worker(port, GRACE)) for port in ports}
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
