"""Runs of the small mesh over three hosts; prints what happened as one JSON object.

Runs in a network namespace of its own (`tests/nightly/runs/test_hosts.py` starts it and judges).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from namespaces import FORGE, Hosts
from small_run import command, latest, rows, run_to_end, running

# A process that imports torch on busy cores is silent for seconds.
HEALTH = {"heartbeat_s": 0.5, "suspect_after_s": 3.0, "dead_after_s": 8.0}
SHORT = {
    "train.steps": 12, "evaluate.arms": ["on_policy"], "evaluate.questions": 4,
    "evaluate.probe_every": 0, "health": HEALTH, "spares": 1,
}  # fmt: skip


def status(run: Path) -> dict[str, Any]:
    words = [*FORGE, "status", str(run), "--json"]
    said = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
    found: dict[str, Any] = json.loads(said)
    return found.get("status", found)


def steer(run: Path, word: str) -> None:
    subprocess.run([*FORGE, word, str(run)], capture_output=True, timeout=120, check=True)


def paused(run: Path) -> None:
    """Pause it, and return once it is: quiet cores would finish it while it is being looked at."""
    steer(run, "pause")
    until(lambda: bool(status(run)["paused"]))


def until(so: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.05)


def told(run: Path, event: str) -> list[dict[str, Any]]:
    """The events of a kind that a run that goes on has told of so far."""
    whole = (run / "events.jsonl").read_text().rpartition("\n")[0]  # the last is half there
    return [e for e in map(json.loads, whole.splitlines()) if e["event"] == event]


def joined(run: Path, host: str) -> int:
    """How often a host has joined the run."""
    return sum(e["host"] == host for e in told(run, "host_joined"))


def all_back(run: Path) -> bool:
    """Whether a replica was lost, and every one that was has come back."""
    lost = {e["replica"] for e in told(run, "replica_lost")}
    return bool(lost) and lost <= {e["replica"] for e in told(run, "replica_back")}


def host_of(run: Path, replica: str) -> int:
    """The index of the host where a replica runs."""
    pools = status(run)["pools"]
    found = next(r for p in pools for r in p["replicas"] if r["name"] == replica)
    return int(found["host"].split(":")[0].rpartition(".")[2]) - 2


def placed(run: Path) -> dict[str, str]:
    return {r["name"]: r["host"] for p in status(run)["pools"] for r in p["replicas"]}


def wait_until_empty(hosts: Hosts) -> None:
    """Nothing but workers is left on the hosts."""
    until(lambda: not hosts.processes())


def scenario(hosts: Hosts, home: Path) -> dict[str, Any]:
    report: dict[str, Any] = {}
    over = {**SHORT, "hosts": {"kind": "addresses", "addresses": hosts.addresses, "insecure": True}}

    def begin(name: str) -> list[str]:
        report[name] = {"path": str(home / name)}
        return command(home / name, **over)

    def ended(name: str, code: int, root: Path) -> None:
        path = latest(root)
        report[name] |= {"code": code, "path": str(path), "events": rows(path / "events.jsonl")}

    report["local"] = {"path": str(home / "local")}
    done = run_to_end(command(home / "local", **SHORT))
    report["local"] |= {"output": done.stdout[-3000:] + done.stderr[-3000:]}
    ended("local", done.returncode, home / "local")

    # A link that is cut and stays cut.
    with running(begin("cut"), home / "cut") as run:
        path = run.wait_for("on_policy", 1)
        paused(path)
        report["cut"]["placed"] = placed(path)
        lost = host_of(path, "generator[0]")
        hosts.cut(lost)
        steer(path, "resume")  # before its silence is noticed: calls are lost on the way
        report["cut"]["host"] = lost
        paused(path)  # later on: the generator that is left could end the run alone
        until(lambda: all_back(path))
        steer(path, "resume")
        output, _ = run.process.communicate(timeout=120)
        report["cut"]["output"] = output[-3000:]
        ended("cut", run.process.returncode, home / "cut")
    hosts.restore(lost)
    wait_until_empty(hosts)

    # The same workers again; one is told to end, and started again.
    with running(begin("drained"), home / "drained") as run:
        path = run.wait_for("on_policy", 1)
        paused(path)
        chosen = host_of(path, "trainer[0]")
        steer(path, "resume")
        hosts.workers[chosen].send_signal(signal.SIGTERM)
        paused(path)  # later on, so that the worker is back before the run ends
        code = hosts.workers[chosen].wait(120)
        report["drained"] |= {"host": chosen, "worker": code}
        hosts.start_again(chosen)
        until(lambda: joined(path, f"10.77.0.{chosen + 2}:26600") == 2)
        steer(path, "resume")
        output, _ = run.process.communicate(timeout=120)
        report["drained"]["output"] = output[-3000:]
        ended("drained", run.process.returncode, home / "drained")
    wait_until_empty(hosts)

    # forge-run itself is told to end.
    with running(begin("stopped"), home / "stopped") as run:
        run.wait_for("on_policy", 1)
        run.process.send_signal(signal.SIGTERM)
        output, _ = run.process.communicate(timeout=120)
        report["stopped"]["output"] = output[-3000:]
        ended("stopped", run.process.returncode, home / "stopped")
    wait_until_empty(hosts)
    for worker in hosts.workers:
        worker.terminate()
    report["idle"] = [worker.wait(60) for worker in hosts.workers]
    return report


if __name__ == "__main__":
    with Hosts(3) as hosts:
        found = scenario(hosts, Path(sys.argv[1]))
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)
