"""Run `forge-run` in child processes, side by side, and stop them with this process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from cartridge_forge.plugins.watch.console import shown_path
from cartridge_forge.protocols.errors import RunError

STOP_SECONDS = 30.0  # a run stops within 10 of SIGTERM
LOOK_SECONDS = 0.2
CODE = "import sys; from cartridge_forge.forge_run.cli import forge_run; sys.exit(forge_run())"


@dataclass(frozen=True)
class ChildRun:
    """Describe a `forge-run` process: its arguments, and the file `log` for its output."""

    name: str
    words: tuple[str, ...]
    log: Path


def run_side_by_side(
    runs: Sequence[ChildRun], began: Callable[[ChildRun], None], at_once: int
) -> Iterator[tuple[ChildRun, str]]:
    """Yield every run with its id as it finishes; at most `at_once` run at a time.

    After a failure no other run starts, those under way finish, and then RunError names the first
    that failed. Leaving early, by Ctrl-C, by SIGTERM (which ends this process too) or by closing
    the iterator, stops the runs under way with their checkpoints. There is no time-out: each run
    has its own watchdog.
    """
    waiting, going = list(runs), dict[ChildRun, "subprocess.Popen[bytes]"]()
    failure: RunError | None = None
    previous = signal.signal(signal.SIGTERM, _leave)
    try:
        while going or (waiting and failure is None):
            while waiting and failure is None and len(going) < at_once:
                child = waiting.pop(0)
                began(child)
                going[child] = _start(child)
            for child in [c for c, process in going.items() if process.poll() is not None]:
                try:
                    run_id = _id_of(child, going.pop(child).returncode)
                except RunError as error:
                    failure = failure or error
                    continue
                yield child, run_id
            time.sleep(LOOK_SECONDS)
    finally:
        try:
            _stop(going.values())
        finally:
            signal.signal(signal.SIGTERM, previous)
    if failure is not None:
        raise failure


def _start(child: ChildRun) -> subprocess.Popen[bytes]:
    """Start in a new session: a terminal's Ctrl-C reaches this process alone, once."""
    with child.log.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", CODE, *child.words], stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def _id_of(child: ChildRun, code: int) -> str:
    output = child.log.read_text(encoding="utf-8", errors="replace")
    if code != 0:
        last = next((x for x in reversed(output.splitlines()) if x.strip()), "it said nothing")
        raise RunError(
            f"{child.name} ended with {code}: {last.strip()}; see {shown_path(child.log)}, and "
            "give the same command again to go on"
        )
    match = re.search(r"^run (\S+)$", output, re.MULTILINE)
    if match is None:
        raise RunError(f"{child.name} named no run; see {shown_path(child.log)}")
    return match[1]


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _stop(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """Terminate all, wait for them, and kill those left."""
    try:
        for process in processes:
            process.terminate()  # does nothing to a process that has ended
        deadline = time.monotonic() + STOP_SECONDS
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
