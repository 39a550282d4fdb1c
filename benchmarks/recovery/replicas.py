"""How long a role is missing: from kill -9, and from SIGSTOP, to HEALTHY again, in a run at work.

    make chaos        a table; runs/bench/replicas.json has every figure

The run is the shipped mesh, cut down to small steps, with its default heartbeats. A replica is
struck once everything is in service, a warm spare included. The controller is back when a run that
is resumed right after its death has done a step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from chaos import REPLACED, ROLES, Eye, Role
from small_run import command, latest, running

from benchmarks.meters import FigureTable, processor_seconds
from benchmarks.record import benchmark
from cartridge_forge.plugins.watch.control.endpoints import read_endpoints

SETS: dict[str, Any] = {
    "train.steps": 100_000,
    "train.checkpoint_every": 20,
    "evaluate.arms": ["on_policy"],
    "evaluate.probe_every": 0,
    **{f"roles.{name}.restarts": 1000 for name in ("generator", "doc_teacher", "trainer")},
}
TIMEOUT_S = 1800.0
STRUCK = tuple(role for role in ROLES if role.name in REPLACED or role.resumed)  # of this run


def at_work(eye: Eye, alive: int) -> None:
    """Wait until every replica serves, the spare is warm, and the run does steps."""

    def is_whole() -> bool:
        replicas = [r for role in ROLES for r in eye.replicas(role.name)]
        if not replicas or {r.state for r in replicas} != {"healthy"}:
            return False
        controller = read_endpoints(latest(eye.run.root)).pid
        pids = {r.pid for r in replicas} | {eye.run.process.pid, controller}
        other_pids = [p for p in eye.run.alive() if p not in pids]
        return len(pids) + len(other_pids) >= alive and all(map(is_idle, other_pids))

    eye.wait(is_whole)
    step = eye.furthest()
    eye.wait(lambda: eye.furthest() > step)


def is_idle(pid: int) -> bool:
    """Return whether a process was nearly idle for a second: then a spare is warm."""
    seconds = processor_seconds(pid)
    time.sleep(1.0)
    return processor_seconds(pid) - seconds < 0.02


def missing_s(eye: Eye, role: Role, number: signal.Signals, rng: random.Random) -> float:
    """Signal one replica of the role; returns seconds until its replacement is HEALTHY."""
    eye.idle(rng.uniform(0, 0.5))  # at a random point of a step
    victim = rng.choice(eye.replicas(role.name))
    start = time.time()
    os.kill(victim.pid, number)

    def back() -> list[float]:
        events = [e for e in eye.events() if e["event"] == "replica_back"]
        return [s for e in events if e["replica"] == victim.name and (s := since(e, start)) > 0]

    eye.wait(lambda: bool(back()))
    return back()[0]


def since(event: dict[str, Any], start: float) -> float:
    """Return seconds from a clock time to an event of the run."""
    return datetime.fromisoformat(event["time"]).timestamp() - start


def replaced(
    root: Path, role: Role, number: signal.Signals, count: int, rng: random.Random
) -> list[float]:
    """Return `missing_s` of `count` deaths, in a separate run: the store has 10 restarts."""
    figures: list[float] = []
    with running(command(root, **SETS), root) as run:
        eye = Eye(run, time.monotonic() + TIMEOUT_S)
        run.wait_for("on_policy", 3)
        eye.idle(10.0)
        alive = len(run.alive())
        while len(figures) < count:
            at_work(eye, alive)
            figures.append(round(missing_s(eye, role, number, rng), 3))
            print(role.name, number.name, figures[-1], flush=True)
        eye.close()
    return figures


def resumed(root: Path, kills: int) -> list[float]:
    """Return seconds from the controller's death to the first step of the resumed run."""
    figures: list[float] = []
    extra: tuple[str, ...] = ()
    start = 0.0
    for starts in range(kills + 1):
        with running(command(root, *extra, **SETS), root) as run:
            eye = Eye(run, time.monotonic() + TIMEOUT_S, starts)

            def first_step(eye: Eye = eye, begin: float = start) -> bool:
                steps = [e for e in eye.events() if e["event"] == "step"]
                return eye.up() and bool(steps) and since(steps[-1], begin) > 0

            eye.wait(first_step)
            if start:
                figures.append(round(time.time() - start, 3))
                print("controller SIGKILL", figures[-1], flush=True)
            run.wait_for("on_policy", 20)
            eye.idle(1.0)
            start = time.time()
            endpoints = json.loads((latest(root) / "endpoints.json").read_text())
            os.kill(endpoints["pid"], signal.SIGKILL)
            run.process.communicate(timeout=60)
            eye.close()
            run.wait_until_gone(10.0)
        extra = ("--resume",)
    return figures


def measure(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    """Strike every role; print medians and maxima beside the role's goal."""
    rng, table = random.Random(options.seed), FigureTable()
    rows: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for role in STRUCK:
            root = Path(folder) / role.name
            if role.resumed:
                rows[role.name] = {"kill": resumed(root, options.kills // 3)}
                continue
            rows[role.name] = {
                "kill": replaced(root / "kill", role, signal.SIGKILL, options.kills, rng),
                "stop": replaced(root / "stop", role, signal.SIGSTOP, options.stops, rng),
            }
    for role, (how, values) in (
        (r, measurement) for r in STRUCK for measurement in rows[r.name].items()
    ):
        if values:
            middle, worst = statistics.median(values), max(values)
            goal = f"<= {role.goal_s:g} s" if role.goal_s and how == "kill" else ""
            row = {"role": role.name, "how": how, "n": len(values)}
            table.add(row | {"median_s": middle, "max_s": worst, "goal": goal})
    return {}, {"unit": "seconds", "rows": rows}


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {
            "--out": Path("runs/bench/replicas.json"),
            "--kills": (10, "kill -9 per role"),
            "--stops": (3, "SIGSTOP per role"),
            "--seed": (0, "who is struck, and when"),
        },
        config=SETS,
    )
