"""How much memory the whole main job takes, how long its steps are, and what share of the
processors orchestrates them.

    python -m benchmarks.users.main_job [--mesh meshes/longhealth.yaml] [--rounds 2]

Evaluations and the offline arm are included. Memory is the sum of the Pss of all its
processes, twice a second: a page that n processes share counts one n-th for each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import benchmark
from benchmarks.users.make import held_bytes

SECONDS = 0.5
GOAL_BYTES = 1.5e9


def run_job(mesh: str, home: Path) -> dict[str, float]:
    """Run the job to its end. Raises its error."""
    sizes = held_bytes(["run", mesh], home, SECONDS)
    (path,) = home.glob("*/2*/results.json")
    results = json.loads(path.read_text())
    return {
        "pss_bytes": max(sizes),
        "pss_bytes_median": int(statistics.median(sizes)),
        "wall_seconds": results["wall_seconds"],
        "step_seconds": results["phases"]["step"],
        "orchestration_over_cpu": results["cpu"]["share"],
    }


def measure(options: argparse.Namespace) -> tuple[Mapping[str, float], Any]:
    rounds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as home:
            rounds.append(run_job(options.mesh, Path(home)))
        print(rounds[-1], flush=True)
    most = max(row["pss_bytes"] for row in rounds)
    return {"memory at most, over 1.5 GB": most / GOAL_BYTES}, rounds


if __name__ == "__main__":
    benchmark(
        __doc__, measure,
        {
            "--mesh": "meshes/longhealth.yaml", "--rounds": 2,
        },
    )  # fmt: skip
