"""Run `forge-run` in a process of its own and yield its events, in a loop or in `async for`."""

from __future__ import annotations

import asyncio
import re
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from cartridge_forge.display import page
from cartridge_forge.events import ArmMeasured, RunEvent, RunFollower, StepTrained
from cartridge_forge.processes import failure, started

OUTPUT = "output"
LOOK_SECONDS = 0.2
STOP_SECONDS = 30.0  # a run stops within 10 of SIGTERM, and then its mesh is killed
STOPPED = (130, 143)  # exit codes of a run that was asked to stop


class TrainingProcess:
    """Iterate over the events of a run as it trains: `for event in training`, or `async for`.

    The run starts with the first event that is asked for. Leaving the loop early, or `close`, stops
    the run after its step, with a checkpoint; `run` is its directory. An error of the run is raised
    as SpecError, DataError or RunError with its message.
    """

    def __init__(self, words: Sequence[str], home: Path) -> None:
        self._words, self._home = tuple(words), home
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._follower: RunFollower | None = None
        self._seen: dict[str, RunEvent] = {}
        self.run: Path | None = None

    def __iter__(self) -> Iterator[RunEvent]:
        try:
            while not self._over():
                yield from self._new()
                time.sleep(LOOK_SECONDS)
            yield from self._new()
            self._require_success()
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[RunEvent]:
        try:
            while not self._over():
                for event in self._new():
                    yield event
                await asyncio.sleep(LOOK_SECONDS)
            for event in self._new():
                yield event
            self._require_success()
        finally:
            await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Stop the run if it still trains, with a checkpoint, and wait for its end."""
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            if process.poll() is None:
                process.kill()
                process.wait()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    @property
    def output(self) -> str:
        """Return what the process has printed."""
        if self._folder is None:
            return ""
        return (Path(self._folder.name) / OUTPUT).read_text(encoding="utf-8", errors="replace")

    def _over(self) -> bool:
        if self._process is None:
            self._folder = tempfile.TemporaryDirectory(prefix="cartridge-forge-")
            self._process = started(self._words, Path(self._folder.name) / OUTPUT)
        return self._process.poll() is not None

    def _new(self) -> list[RunEvent]:
        if self._follower is None:
            named = re.search(r"^run (\S+)$", self.output, re.MULTILINE)
            if named is None:
                return []
            self.run = self._home / named[1]
            self._follower = RunFollower(self.run, from_start="--resume" not in self._words)
        events = self._follower.new()
        for event in events:
            key = f"arm {event.arm}" if isinstance(event, ArmMeasured) else event.name
            self._seen[key] = event
        return events

    def _require_success(self) -> None:
        assert self._process is not None
        code = self._process.returncode
        if code != 0 and code not in STOPPED:
            raise failure(code, self.output)

    def _repr_html_(self) -> str:
        step = self._seen.get("step")
        rows = [("run", "not started" if self.run is None else self.run.name)]
        if isinstance(step, StepTrained):
            kl = "-" if step.kl is None else f"{step.kl:.4f}"
            rows += [("arm", step.arm), ("step", str(step.step)), ("KL", kl)]
        measured = [event for event in self._seen.values() if isinstance(event, ArmMeasured)]
        rows += [(f"accuracy, {event.arm}", f"{event.accuracy:.1%}") for event in measured]
        return page("training", ("", ""), rows)
