"""Runs of the small mesh on the two nodes of a real Slurm; prints what happened as one JSON object.

`tests/clusters/slurm.sh` runs it beside that Slurm, for `tests/nightly/runs/test_slurm_real.py`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mesh_scenario import SHORT, all_back, paused, until
from namespaces import beside
from small_run import Running, command, latest, rows, run_to_end, running

STEPS = 20
LOGIN = "10.77.0.1"  # the address that slurm.sh gives this program
ANSWER_SECONDS = 60.0
RUN_SECONDS = 500.0
# A process that starts on busy cores is silent for long.
HEALTH = {"heartbeat_s": 0.5, "suspect_after_s": 5.0, "dead_after_s": 25.0}
LONG = {**SHORT, "train.steps": STEPS, "health": HEALTH, "call_timeout_s": 600}
Act = Callable[[Running, Path], None]


def ask(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_SECONDS)
    return done.stdout.strip() + done.stderr.strip()


def jobs() -> dict[int, str]:
    """Every job that Slurm remembers, and its state."""
    found = (line.split() for line in ask("squeue", "-h", "-t", "all", "-o", "%i %T").splitlines())
    return {int(job): state for job, state in found}


def running_job() -> str:
    [job] = (str(job) for job, state in jobs().items() if state == "RUNNING")
    return job


def guard(node: str) -> int:
    """The process in a node's namespace that is none of Slurm's."""
    return int((Path(os.environ["FORGE_SLURM_NODES"]) / node).read_text())


def lose_power(node: str) -> None:
    """All the node's processes end at once, and its link."""
    subprocess.run(["ip", "link", "set", node, "down"], check=True)
    keep = guard(node)
    for pid in (pid for pid in beside(keep) if pid != keep):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Runs:
    """Runs with a job each, in directories below `home`. `report` maps a run's name to its end."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.report: dict[str, dict[str, Any]] = {}
        self._newest = 0  # Slurm numbers jobs from 1, and forgets them after five minutes

    def run(self, name: str, act: Act, *args: str) -> None:
        """Start a run, do `act` to it once it has trained a step, and wait for its end."""
        begun, root = time.monotonic(), self.home / name
        with running(self._words(name, *args), root) as run:
            act(run, run.wait_for("on_policy", 1))
            acted = time.monotonic()
            said, _ = run.process.communicate(timeout=RUN_SECONDS)
            over = time.monotonic()
            run.wait_until_gone(ANSWER_SECONDS)  # on the nodes too: a job has its environment
        self._tell(name, name, run.process.returncode, said)
        self.report[name]["seconds"] = [round(acted - begun, 1), round(over - acted, 1)]

    def resume(self, name: str) -> None:
        """Continue a run that has ended, with another job."""
        done = run_to_end([*self._words(name), "--resume"], RUN_SECONDS)
        self._tell(f"{name} again", name, done.returncode, done.stdout + done.stderr)

    def _words(self, name: str, *args: str) -> list[str]:
        slurm = {"nodes": 2, "args": list(args)}
        hosts = {"kind": "slurm", "slurm": slurm, "insecure": True, "reached_at": LOGIN}
        return command(self.home / name, **{**LONG, "hosts": hosts})

    def _tell(self, name: str, root: str, code: int, said: str) -> None:
        until(lambda: not {"COMPLETING", "RUNNING", "PENDING"} & {*jobs().values()})
        path, now = latest(self.home / root), jobs()
        self.report[name] = {
            "code": code, "said": " ".join(said.split()), "path": str(path),
            "events": rows(path / "events.jsonl"), "jobs": max(now) - self._newest,
            "state": now[max(now)],
        }  # fmt: skip
        self._newest = max(now)


def scenario(home: Path) -> dict[str, Any]:
    runs = Runs(home)
    done = run_to_end(command(home / "local", **LONG), RUN_SECONDS)
    runs.report["local"] = {
        "code": done.returncode, "said": done.stderr[-2000:], "path": str(latest(home / "local")),
    }  # fmt: skip

    def try_to_requeue(run: Running, path: Path) -> None:
        runs.report["requeue"] = {"answer": ask("scontrol", "requeue", running_job())}

    def fail_a_node(run: Running, path: Path) -> None:
        """Not the one where the job's script runs: the job would end with it."""
        shown = ask("scontrol", "show", "job", running_job())
        found = re.search(r"BatchHost=(\S+)", shown)
        assert found, shown
        lose_power("node2" if found[1] == "node1" else "node1")
        until(lambda: all_back(path), RUN_SECONDS)

    def cancel(run: Running, path: Path) -> None:
        ask("scancel", running_job())

    def cancel_paused(run: Running, path: Path) -> None:
        paused(path)
        cancel(run, path)

    def requeue(run: Running, path: Path) -> None:
        ask("scontrol", "requeue", running_job())

    runs.run("whole", try_to_requeue)
    runs.run("cancelled", cancel)
    runs.resume("cancelled")
    runs.run("paused", cancel_paused)
    runs.resume("paused")
    runs.run("requeued", requeue, "--requeue")
    runs.run("node", fail_a_node)  # the last: the node stays without power
    return runs.report


if __name__ == "__main__":
    found = scenario(Path(sys.argv[1]))
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)
