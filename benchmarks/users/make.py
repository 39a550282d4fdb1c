"""How soon `forge make` has its first trained step, and how much memory the whole command takes.

    python -m benchmarks.users.make FOLDER [--model smollm2-135m] [--minutes 4] [--rounds 3]

Seconds count from the command to events of the run. Memory is the sum of the Pss of all processes
of the command, every SECONDS, to its end: a page that n processes share counts one n-th for each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.record import benchmark
from cartridge_forge.processes import failure, started
from cartridge_forge.services.proc_info import descendants

SECONDS = 5.0  # reading the maps of large processes halts them
TOLD = ("run_started", "role_ready", "step")  # the last of each, up to the first step


def pss_bytes(pid: int) -> int:
    """Return the proportional set size of a process and all its descendants."""
    total = 0
    for member in (pid, *descendants(pid)):
        with suppress(OSError):  # gone meanwhile
            for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += 1024 * int(line.split()[1])
    return total


def held_bytes(words: Sequence[str], home: Path, every: float) -> list[int]:
    """Run `forge WORDS` with its runs in `home`; return the bytes it held every so many seconds.
    Raises its error."""
    output, sizes = home / "output", []
    command = started([*words, "--run-dir", str(home)], output)
    try:
        while command.poll() is None:
            sizes.append(pss_bytes(command.pid))
            time.sleep(every)
    finally:
        command.terminate()  # of one that still runs: this benchmark was interrupted
        command.wait()
    if command.returncode:
        raise failure(command.returncode, output.read_text())
    return sizes


def seconds_to(events: Path, start: float) -> dict[str, float]:
    """Return the seconds from `start`, of the clock of the day, to the first trained step and what
    comes before it."""
    seconds: dict[str, float] = {}
    for line in events.read_text().splitlines():
        row = json.loads(line)
        if row["event"] in TOLD:
            seconds[row["event"]] = round(
                datetime.fromisoformat(row["time"]).timestamp() - start, 1
            )
        if row["event"] == "step":
            return seconds
    raise SystemExit(f"{events} tells of no step")


def run_make(options: argparse.Namespace, home: Path) -> dict[str, float]:
    """Run the command once to its end. Raises its error."""
    words = ["make", options.folder, "--model", options.model, "--minutes", str(options.minutes)]
    start = time.time()
    sizes = held_bytes(words, home, SECONDS)
    seconds = round(time.time() - start, 1)
    (events,) = home.glob("*/2*/events.jsonl")
    return {**seconds_to(events, start), "whole": seconds, "pss_bytes": max(sizes)}


def measure(options: argparse.Namespace) -> tuple[Mapping[str, float], Any]:
    rounds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as home:
            rounds.append(run_make(options, Path(home)))
        print(rounds[-1], flush=True)
    shares = [row["step"] / (60 * options.minutes) for row in rounds]
    return {"first step, of the minutes asked for": max(shares)}, rounds


if __name__ == "__main__":
    benchmark(
        __doc__, measure,
        {
            "folder": {"help": "documents"}, "--model": "smollm2-135m", "--minutes": 4.0,
            "--rounds": 3,        },
    )  # fmt: skip
