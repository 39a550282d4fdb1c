"""How soon the command line answers every mistake of the tests, and what importing costs.

    PYTHONPATH=tests/scenarios python -m benchmarks.users.command_line [--rounds 3]

Each mistake is made in a process of its own, as a person makes it. `wall` is the least of the
rounds, and so is `cpu`, which other work on the cores hardly changes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mistakes import MISTAKES

from benchmarks.record import benchmark

ROOT = Path(__file__).parents[2]
FORGE = "import sys; from forge_run.cli import forge; sys.exit(forge())"
BARE, IMPORT = "pass", "from cartridge_forge import *"


def timed(code: str, words: Sequence[str], rounds: int) -> tuple[float, float]:
    """Return the least wall and CPU seconds of a process of its own."""
    walls, cpus = [], []
    for _ in range(rounds):
        begun, before = time.perf_counter(), os.times()
        subprocess.run(
            [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, timeout=300,
        )  # fmt: skip
        after = os.times()
        walls.append(time.perf_counter() - begun)
        cpus.append(
            after.children_user + after.children_system
            - before.children_user - before.children_system
        )  # fmt: skip
    return min(walls), min(cpus)


def measure(asked: argparse.Namespace) -> tuple[Mapping[str, float], Any]:
    bare, imported = (timed(code, (), 2 * asked.rounds) for code in (BARE, IMPORT))
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as empty:
        for text in MISTAKES:
            wall, cpu = timed(FORGE, text.replace("EMPTY", empty).split(), asked.rounds)
            rows[text] = {"wall": round(wall, 3), "cpu": round(cpu, 3)}
            print(f"{wall:6.2f} s  {cpu:6.2f} s of CPU  {text}")
    slowest = max(rows, key=lambda text: rows[text]["cpu"])
    results = {
        "mistakes": len(rows), "slowest": slowest, "slowest_seconds": rows[slowest],
        "over_a_second": [text for text, row in rows.items() if row["wall"] >= 1],
        "python_seconds": bare, "import_seconds": imported, "rows": rows,
    }  # fmt: skip
    print(f"python alone {bare[0]:.3f} s, with the package {imported[0]:.3f} s")
    return {"import, over python alone": imported[1] / bare[1]}, results


if __name__ == "__main__":
    benchmark(
        __doc__, measure,
        {"--rounds": 3, "--out": Path("benchmarks/results/users/command_line.json")},
        {"rounds": 1},
    )  # fmt: skip
