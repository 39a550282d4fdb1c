"""A run in a process of its own, which ends when this one is told to."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from forge_run.display import shown_path
from protocols.errors import RunError

STOP_SECONDS = 30.0  # a run that was asked to stop is gone within 10


def run_apart(name: str, words: Sequence[str], log: Path) -> str:
    """`forge-run` with these words, what it prints going to `log`; returns the run's id.

    Raises RunError, which starts with `name`, when the run failed or was stopped. There is no
    time-out: the run has a watchdog of its own.
    """
    code = "import sys; from forge_run.cli import forge_run; sys.exit(forge_run())"
    with log.open("wb") as file, _ended_with_us([sys.executable, "-c", code, *words], file) as run:
        run.wait()
    said = log.read_text(encoding="utf-8", errors="replace")
    if run.returncode != 0:
        last = next((x for x in reversed(said.splitlines()) if x.strip()), "it said nothing")
        raise RunError(
            f"{name} ended with {run.returncode}: {last.strip()}; see {shown_path(log)}, and "
            "ablate again to go on"
        )
    found = re.search(r"^run (\S+)$", said, re.MULTILINE)
    if found is None:
        raise RunError(f"{name} named no run; see {shown_path(log)}")
    return found[1]


@contextmanager
def _ended_with_us(words: Sequence[str], output: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is stopped, with its checkpoint, when the block is left early: by Ctrl-C, or
    by SIGTERM, which ends us as well.

    It has a session of its own: a terminal's Ctrl-C reaches this process alone, once.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        try:
            process.terminate()  # does nothing to a process that has ended
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        finally:
            process.kill()
            process.wait()
            signal.signal(signal.SIGTERM, before)
