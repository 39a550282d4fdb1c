"""What pages of a run cost: an open page, and rollouts of a million tokens.

    PYTHONPATH=tests/fakes python -m benchmarks.users.watching [--seconds 60] [--tokens 1000000]

`forge ui` runs as a person starts it, beside a run directory into which a step is written each
second, as the main job of the README does on two cores. The same requests are sent that an open
page of the run sends. CPU seconds are the server's own; the main job's are those of its results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recorded_run import SAID, recorded_run, rollout, train

from benchmarks.record import benchmark
from benchmarks.results import records
from services.run_directory import RunDirectory

TOKEN = "of-the-benchmark"
FORGE = "import sys; from forge_run.cli import forge; sys.exit(forge())"
OPEN_EVERY = 3.0  # seconds after which the page of a run that goes on asks again


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, int]]:
    """Serve a folder of runs; yields the address and the process id."""
    words = ("ui", str(folder), "--listen", "127.0.0.1:0", "--token-env", "TOKEN")
    env = {**os.environ, "TOKEN": TOKEN}
    server = subprocess.Popen(
        [sys.executable, "-c", FORGE, *words], stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split()[1].rstrip("/"), server.pid
    finally:
        server.terminate()
        server.wait(timeout=30)


def ask(address: str, what: str, **query: Any) -> Any:
    pairs = "&".join(f"{key}={value}" for key, value in query.items())
    asked = urllib.request.Request(
        f"{address}/api/{what}?{pairs}", headers={"authorization": f"Bearer {TOKEN}"}
    )
    with urllib.request.urlopen(asked, timeout=120) as reply:
        return json.load(reply)


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spent(pid: int, seconds: float, each: Callable[[], None]) -> float:
    """Return the CPU seconds that a process takes in a second while `each` is done every second."""
    begun, before = time.monotonic(), cpu_of(pid)
    done = 0
    while (left := begun + seconds - time.monotonic()) > 0:
        each()
        done += 1
        time.sleep(max(0.0, min(left, begun + done - time.monotonic())))
    return (cpu_of(pid) - before) / (time.monotonic() - begun)


def open_page(address: str, run: RunDirectory, seconds: float, pid: int) -> dict[str, float]:
    """Return the server's CPU seconds a second: with no page, with one of a run that stands still,
    and with one of a run that makes a step each second."""
    key = f"tiny/{run.id}"
    for what in ("overview", "curves", "steps", "events"):
        ask(address, what, run=key)
    found = {"no page": spent(pid, seconds, lambda: None)}
    stream = urllib.request.Request(
        f"{address}/api/changes?run={key}", headers={"authorization": f"Bearer {TOKEN}"}
    )
    with urllib.request.urlopen(stream, timeout=120):
        found["an idle page"] = spent(pid, seconds, lambda: None)
        step = len(run.metrics.read_text().splitlines())

        def makes_a_step() -> None:
            nonlocal step
            step += 1
            train(run, step)
            ask(address, "overview", run=key)
            ask(address, "curves", run=key, generation=0, after=step - 1)
            ask(address, "steps", run=key, generation=0, after=step - 1)
            ask(address, "events", run=key)

        found["a page that follows"] = spent(pid, seconds, makes_a_step)
    return found


def a_million(address: str, run: RunDirectory, pid: int) -> dict[str, Any]:
    """Return seconds of browsing: the first page, with the index; a page from the middle; filters;
    a row with its question at other versions."""
    key, source = f"tiny/{run.id}", "rollouts"
    found: dict[str, Any] = {}

    def timed(name: str, what: str, **query: Any) -> Any:
        begun = time.perf_counter()
        told = ask(address, what, run=key, source=source, **query)
        found[name] = round(time.perf_counter() - begun, 3)
        return told

    told = timed("the first page", "rollouts")
    found |= {"rows": told["total"], "tokens": told["tokens"]}
    timed("the first page again", "rollouts")
    timed("a page from the middle", "rollouts", skip=told["total"] // 2)
    timed("one step", "rollouts", step=told["choices"]["steps"][1] // 2)
    timed("one document", "rollouts", document="patient_01", kind="question")
    timed("a row", "rollout", number=told["total"] // 2)
    status = Path(f"/proc/{pid}/status").read_text()
    found["server MB"] = int(status.partition("VmRSS:")[2].split()[0]) // 1000
    return found


def measure(asked: argparse.Namespace) -> tuple[Mapping[str, float], Any]:
    main = records.whole("longhealth", "results.json")
    a_second = main["cpu"]["all"] / main["wall_seconds"]
    with tempfile.TemporaryDirectory() as folder:
        run = recorded_run(Path(folder))
        with served(Path(folder)) as (address, pid):
            pages = open_page(address, run, asked.seconds, pid)
        large = recorded_run(Path(folder), minute=1)
        steps = asked.tokens // (64 * len(SAID))
        for step in range(3, 3 + steps):
            large.append_rollouts([rollout(step, i % 4, id=f"r/{step}/{i}") for i in range(64)])
        with served(Path(folder)) as (address, pid):
            rows = a_million(address, large, pid)
    shares = {name: round(seconds / a_second, 5) for name, seconds in pages.items()}
    for name, share in shares.items():
        print(f"{name}: {1000 * pages[name]:.2f} ms of CPU a second, {share:.2%} of the run's")
    print(rows)
    results = {"cpu_a_second": pages, "run_cpu_a_second": a_second, "shares": shares, "rows": rows}
    return {}, results


if __name__ == "__main__":
    benchmark(
        __doc__, measure,
        {
            "--seconds": 60.0, "--tokens": 1_000_000,
            "--out": Path("benchmarks/results/users/watching.json"),
        },
        {"seconds": 10.0, "tokens": 100_000},
    )  # fmt: skip
