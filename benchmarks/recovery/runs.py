"""How soon a run ends, or goes on, after a fault of its directory, its controller or all its roles.

    make chaos        a table; runs/bench/runs.json has every figure and what was said

The run is the shipped mesh, cut down to small steps. `told` counts from the fault to the line that
says what happened, `ended` to the end of the command that a user waits for, which writes a report,
`gone` to the end of its last process, `resumed` from the next command to the first step of the
resumed run, and `back` to the time when every role is healthy again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos import ROLES, Eye
from small_run import Running, command, latest, running

from benchmarks.meters import FigureTable
from benchmarks.record import benchmark
from cartridge_forge.plugins.watch.control.endpoints import read_endpoints

SETS: dict[str, Any] = {
    "train.steps": 100_000,
    "train.checkpoint_every": 20,
    "evaluate.arms": ["on_policy"],
    "evaluate.probe_every": 0,
}
START_S = 600.0
END_S = 120.0
DISK = "24m"


@dataclass(frozen=True)
class FaultOutcome:
    """Hold what a fault did to a run: seconds (None where it does not apply), the exit code of the
    command, and the last line that begins with "error:" or "kept:"."""

    fault: str
    told: float | None = None
    ended: float | None = None
    gone: float | None = None
    resumed: float | None = None
    back: float | None = None
    code: int | None = None
    said: str = ""


Fault = Callable[[Path, Running], object]


def full_disk(root: Path, run: Running) -> None:
    """Take all room of the run's disk."""
    with (root / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(2**12))


def removed_directory(root: Path, run: Running) -> None:
    """Remove the run's directory."""
    shutil.rmtree(latest(root), ignore_errors=True)


def hangup(root: Path, run: Running) -> None:
    """Close the terminal: SIGHUP to the client."""
    run.process.send_signal(signal.SIGHUP)


def dead_controller(root: Path, run: Running) -> None:
    """Kill the controller."""
    os.kill(read_endpoints(latest(root)).pid, signal.SIGKILL)


def damaged_checkpoint(root: Path, run: Running) -> None:
    """Kill the controller, and damage the newest checkpoint and the end of a log."""
    dead_controller(root, run)
    newest = max((latest(root) / "checkpoints").glob("version-*"))
    part = next(newest.glob("cartridge-*"))
    part.write_bytes(part.read_bytes()[:-1])
    with (latest(root) / "events.jsonl").open("ab") as log:
        log.write(b'{"time')


def outcome(name: str, root: Path, fault: Fault, resumes: bool) -> FaultOutcome:
    """Run until step 25, do the damage, wait for the end; resume the run where it can be."""
    with running(command(root, **SETS), root) as run:
        run.wait_for("on_policy", 25, START_S)
        start = time.monotonic()
        fault(root, run)
        lines = printed_lines(run, start)
        ended = time.monotonic() - start
        run.wait_until_gone(END_S)
        seconds_to_exit = time.monotonic() - start
    messages = [(at, line) for at, line in lines if line.startswith(("error:", "kept:", "stopped"))]
    (root / "filler").unlink(missing_ok=True)
    return FaultOutcome(
        name, messages[0][0] if messages else None, ended, seconds_to_exit,
        resumed_s(root) if resumes else None, None, run.process.returncode,
        (messages or lines)[-1][1],
    )  # fmt: skip


def printed_lines(run: Running, start: float) -> list[tuple[float, str]]:
    """Return the lines that the command prints until it ends, with the seconds since `start`."""
    late = threading.Timer(END_S, run.process.kill)
    late.start()
    try:
        lines = [(time.monotonic() - start, line.rstrip()) for line in run.process.stdout or ()]
        run.process.wait(END_S)
    finally:
        late.cancel()
    return lines


def resumed_s(root: Path) -> float:
    """Return seconds from `--resume` to the first step of the resumed run."""
    start = time.monotonic()
    with running(command(root, "--resume", **SETS), root) as run:
        eye = Eye(run, start + START_S, starts=1)
        eye.wait(eye.up)
        steps = sum(e["event"] == "step" for e in eye.events())
        eye.wait(lambda: sum(e["event"] == "step" for e in eye.events()) > steps)
        return time.monotonic() - start


def read_only(root: Path) -> FaultOutcome:
    """Resume a run whose directory lies on a disk that takes no writes."""
    with running(command(root, **SETS), root) as run:
        run.wait_for("on_policy", 25, START_S)
        run.process.send_signal(signal.SIGTERM)
        run.process.communicate(timeout=END_S)
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    start = time.monotonic()
    with running(command(root, "--resume", **SETS), root) as run:
        messages = [pair for pair in printed_lines(run, start) if pair[1].startswith("error:")]
        ended = time.monotonic() - start
        run.wait_until_gone(END_S)
        seconds_to_exit = time.monotonic() - start
    subprocess.run(["mount", "-o", "remount,rw", str(root)], check=True)
    code, (at, line) = run.process.returncode, messages[0]
    return FaultOutcome(
        "--resume on a read-only disk", at, ended, seconds_to_exit, code=code, said=line
    )


def second_owner(root: Path) -> FaultOutcome:
    """Resume a run that is running."""
    with running(command(root, **SETS), root) as run:
        run.wait_for("on_policy", 2, START_S)
        start = time.monotonic()
        with running(command(root, "--resume", **SETS), root) as second:
            messages = [
                pair for pair in printed_lines(second, start) if pair[1].startswith("error:")
            ]
            ended = time.monotonic() - start
            second.wait_until_gone(END_S)
            seconds_to_exit = time.monotonic() - start
        assert run.process.poll() is None, "the first owner goes on"
    code, (at, line) = second.process.returncode, messages[0]
    return FaultOutcome(
        "--resume of a run in progress", at, ended, seconds_to_exit, code=code, said=line
    )


def all_roles(root: Path) -> FaultOutcome:
    """Kill every replica of every role at once; the run goes on by itself."""
    with running(command(root, **SETS), root) as run:
        eye = Eye(run, time.monotonic() + START_S)
        run.wait_for("on_policy", 5, START_S)
        eye.wait(lambda: eye.status() is not None)
        killed = {r.pid for role in ROLES for r in eye.replicas(role.name)}
        start = time.monotonic()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

        def back() -> bool:
            replicas = [r for role in ROLES for r in eye.replicas(role.name)]
            states = {r.state for r in replicas if r.pid not in killed}
            return len(replicas) == len(killed) and states == {"healthy"}

        eye.wait(lambda: back() and not killed & {r.pid for r in eye.replicas("trainer")})
        seconds = time.monotonic() - start
        step = eye.furthest()
        eye.wait(lambda: eye.furthest() > step)
        eye.close()
    return FaultOutcome(f"all {len(killed)} replicas killed at once", back=seconds)


FAULTS: Mapping[str, tuple[Fault, bool]] = {
    "full disk": (full_disk, True),
    "directory removed": (removed_directory, False),
    "SIGHUP": (hangup, True),
    "controller killed": (dead_controller, True),
    "controller killed, newest checkpoint and a log damaged": (damaged_checkpoint, True),
}


def own_disk(folder: Path) -> bool:
    """Mount a small file system of its own; return whether this user may."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    return os.getuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0


def measure(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    """Do every fault `--times` times; print a row for each."""
    table, rows = FigureTable(), []
    for _ in range(options.times):
        for name, do in _trials().items():
            with tempfile.TemporaryDirectory() as folder:
                disk = Path(folder) / "disk"
                mounted = own_disk(disk)
                try:
                    if not mounted and "disk" in name:
                        print(f"{name}: not done, for only root may mount a file system")
                        continue
                    outcome_row = do(disk)
                finally:
                    if mounted:
                        subprocess.run(["umount", "--lazy", str(disk)], check=True)
            rows.append(asdict(outcome_row))
            seconds = {key: rows[-1][key] for key in TIMES}
            cells = {k: "" if v is None else round(v, 1) for k, v in seconds.items()}
            table.add(
                {
                    "fault": name,
                    **cells,
                    "code": "" if outcome_row.code is None else outcome_row.code,
                }
            )
            print(f"    {outcome_row.said}", flush=True)
    return {}, {"unit": "seconds", "rows": rows}


TIMES = ("told", "ended", "gone", "resumed", "back")


def _trials() -> dict[str, Callable[[Path], FaultOutcome]]:
    def trial(name: str, fault: Fault, resumes: bool) -> Callable[[Path], FaultOutcome]:
        return lambda root: outcome(name, root, fault, resumes)

    return {
        **{name: trial(name, fault, resumes) for name, (fault, resumes) in FAULTS.items()},
        "--resume on a read-only disk": read_only,
        "--resume of a run in progress": second_owner,
        "all replicas killed at once": all_roles,
    }


if __name__ == "__main__":
    benchmark(__doc__, measure, {"--times": (1, "how often each fault is done")}, config=SETS)
