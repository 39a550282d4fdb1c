"""Runs whose every process stands still for a while, as in a paused container.

    PYTHONPATH=tests:tests/fakes:tests/setups:tests/scenarios:tests/clusters \\
      python -m benchmarks.recovery.pauses [--short 26] [--long 4] [--resume]

One run is left in peace. Of each other one all processes get SIGSTOP right after a drawn step, and
SIGCONT after 5 to 60 s, or 300 to 600 s of the long ones. Such a run must end with 0, lose no
replica, and have the bytes of the one in peace. The record is written after each; --resume goes on
after its last. The exit code is 1 where one failed. 26 and 4 take about 90 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from small_run import STALE, command, latest, rows, run_to_end, running, same_outcome

from benchmarks.record import parsed, provenance, read, write

SHORT_S, LONG_S = (5.0, 60.0), (300.0, 600.0)
STEPS = 4  # of the six that a run has: a pause falls after one of the first
END_S = 900.0


def stand_still(pids: list[int], seconds: float) -> None:
    """Stop the processes, and let them go on after so many seconds."""
    for number, pause in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0.0)):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(pause)


def paused(root: Path, step: int, seconds: float, calm: Path) -> dict[str, Any]:
    """Return the row of a run that stood still after a step."""
    with running(command(root, **STALE), root) as run:
        path = run.wait_for("on_policy", step, timeout=END_S)
        stand_still(run.alive(), seconds)
        output, _ = run.process.communicate(timeout=END_S)
        code = run.process.returncode
    lost = [row["replica"] for row in rows(path / "events.jsonl") if row["event"] == "replica_lost"]
    changed = ""
    if code == 0:
        try:
            same_outcome(path, calm)
        except AssertionError as error:
            changed = str(error).splitlines()[0][:200]
    row = {"step": step, "seconds": round(seconds, 1), "code": code, "lost": lost}
    return row | {"changed": changed, "output": output[-500:] if code else ""}


def draw(options: argparse.Namespace) -> list[tuple[int, float]]:
    """Return the step and the length of each pause, the short ones first."""
    rng = random.Random(options.seed)
    lengths = [SHORT_S] * options.short + [LONG_S] * options.long
    return [(rng.randint(1, STEPS), rng.uniform(*bounds)) for bounds in lengths]


def main() -> None:
    options = parsed(
        __doc__,
        {
            "--out": Path("runs/bench/pauses.json"),
            "--short": (26, "pauses of 5 to 60 s"),
            "--long": (4, "pauses of 300 to 600 s"),
            "--seed": (5, "which step, and how long"),
            "--resume": (False, "go on after the rows of a record that was interrupted"),
        },
        {},
    )
    table: list[dict[str, Any]] = []
    if options.resume and options.out.is_file():
        table = read(options.out)["results"]
    origin = provenance("pauses", vars(options), "benchmarks.recovery.pauses")
    with tempfile.TemporaryDirectory() as folder:
        calm = Path(folder) / "calm"
        process = run_to_end(command(calm, **STALE), END_S)
        if process.returncode:
            raise SystemExit(process.stdout + process.stderr)
        for number, (step, seconds) in list(enumerate(draw(options)))[len(table) :]:
            table.append(paused(Path(folder) / str(number), step, seconds, latest(calm)))
            print(json.dumps(table[-1]), flush=True)
            write(options.out, origin, {}, table)
    failed = [row for row in table if row["code"] or row["lost"] or row["changed"]]
    print(f"{len(failed)} of {len(table)} pauses failed a run or changed it")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
