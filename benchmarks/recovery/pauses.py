"""Whether a run survives that all its processes stand still: a paused container, a closed lid.

    make pauses      runs/pauses/pauses.json has every pause

The run is the shipped mesh, cut down to small steps with rollouts one step ahead. Each pause stops
every process of one run (SIGSTOP), at a random moment of its start or after a random step, for 5 to
60 seconds or, the long ones, for 300 to 600, and continues them. A pause is survived where the run
ends with exit code 0, has lost no replica, and has the same bytes as a run without a pause. A
repeated command goes on: pauses in pauses.jsonl, beside the record, are not made again.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from small_run import STALE, command, latest, run_to_end, running, same_outcome

from benchmarks.record import benchmark
from cartridge_forge.protocols.files import append_rows, read_rows

STEPS = 12
SETS: dict[str, Any] = {**STALE, "train.steps": STEPS}
END_S = 1800.0  # beside other work
ATTEMPTS = 9


class TooLate(Exception):
    """Report that a run ended before it could be stopped."""


@dataclass(frozen=True)
class Pause:
    """Hold one pause: it begins `after_s` after `step` was recorded (0: after the start of the
    command) and takes `seconds`. `lost` are the replicas that were lost, `fault` is what went
    wrong, "" for nothing."""

    number: int
    step: int
    after_s: float
    seconds: float
    lost: int = 0
    fault: str = ""


def drawn(short: int, long: int) -> list[Pause]:
    """Return the pauses to make."""
    draws = random.Random("pauses")
    spans = [(5.0, 60.0)] * short + [(300.0, 600.0)] * long
    pauses = []
    for i, span in enumerate(spans):
        step = draws.randrange(STEPS - 1)
        delay = draws.uniform(0.0, 1.0 if step else 20.0)
        pauses.append(Pause(i, step, delay, draws.uniform(*span)))
    return pauses


def run_pause(pause: Pause, reference: Path) -> Pause:
    """Make one pause in a run of its own, and return it with its end."""
    for _ in range(ATTEMPTS):
        with suppress(TooLate):
            return attempt(pause, reference)
    raise SystemExit(f"{ATTEMPTS} runs ended before step {pause.step} was seen")


def attempt(pause: Pause, reference: Path) -> Pause:
    """Make one pause in a run of its own, and return it with its end. Raises TooLate where the run
    ended well before a busy machine let this process see its step."""
    with tempfile.TemporaryDirectory(prefix="pause-") as folder:
        root = Path(folder)
        fault = ""
        with running(command(root, **SETS), root) as run:
            try:
                if pause.step:
                    run.wait_for("on_policy", pause.step, END_S)
            except AssertionError:
                if run.process.poll() == 0:
                    raise TooLate from None
                raise
            time.sleep(pause.after_s)
            run.stand_still(pause.seconds)
            printed, _ = run.process.communicate(timeout=END_S)
            if run.process.returncode:
                fault = f"exit code {run.process.returncode}: {printed[-500:]}"
        path = latest(root)
        events = read_rows(path / "events.jsonl") if (path / "events.jsonl").exists() else []
        lost = sum(row["event"] == "replica_lost" for row in events)
        if not fault:
            try:
                same_outcome(path, reference)
            except AssertionError as error:
                fault = f"other bytes: {error}"[:500]
        return replace(pause, lost=lost, fault=fault)


def measure(options: Any) -> tuple[Mapping[str, float], Any]:
    rows = options.out.parent / "pauses.jsonl"
    numbers = {row["number"] for row in (read_rows(rows) if rows.exists() else [])}
    with tempfile.TemporaryDirectory(prefix="calm-") as folder:
        root = Path(folder)
        process = run_to_end(command(root, **SETS), timeout=END_S)
        if process.returncode:
            raise SystemExit(process.stdout + process.stderr)

        def one(pause: Pause) -> None:
            append_rows(rows, [asdict(run_pause(pause, latest(root)))])
            print(rows.read_text().splitlines()[-1], flush=True)

        with ThreadPoolExecutor(options.together) as pool:
            wanted = drawn(options.short, options.long)
            list(pool.map(one, [p for p in wanted if p.number not in numbers]))
    results = sorted(read_rows(rows), key=lambda row: row["number"])
    failed = sum(bool(row["fault"] or row["lost"]) for row in results)
    print(json.dumps({"pauses": len(results), "failed": failed}))
    return {}, results


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {
            "--short": (26, "pauses of 5 to 60 seconds"),
            "--long": (4, "pauses of 300 to 600 seconds"),
            "--together": (2, "runs beside each other"),
        },
    )
