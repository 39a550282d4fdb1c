"""Find where a run goes on: at the trainer's last state where the run's own is of that step too, or
at a checkpoint.

    checkpoints/last-state/       the trainer's state, of every step (learning.checkpoint)
    checkpoints/run-state.json    the run's: {"version": 41, "state": {"arm": "on_policy", ...},
                                  "rows": {"metrics.jsonl": 8122, ...}}, with the files' sizes,
                                  and a line with the CRC-32 of this

The run's state is written after a step's rows, so a killed run goes on with the step it was in. One
that was killed between its trainer's step and the step's rows has states of two steps on disk, and
goes on at its newest checkpoint. Runs with rollouts ahead write none: these are in memory alone.

The run's state is written over the last one: to replace its file took a tenth of the controller's
Python. A write of both halves is found by the checksum. Nothing is flushed: what a machine lost
with its power is found by the sizes, by the version, or by the trainer's checksums.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from cartridge_forge.protocols.files import with_room
from cartridge_forge.services.run_directory import Position, RunDirectory

VERSION = "version-"  # begins the name of a checkpoint


@dataclass(frozen=True)
class ResumePoint:
    """Hold what a run goes on from: the trainer's last state with the run's `state`, or where that
    is None the `checkpoint`, or with neither the start."""

    checkpoint: Path | None = None
    state: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        if self.state is not None:
            return f"after {_step(self.state)}, from the trainer's last state"
        if self.checkpoint is None:
            return "from the start"
        with suppress(OSError, ValueError, KeyError, TypeError):
            manifest = json.loads((self.checkpoint / "manifest.json").read_text())
            return f"from {self.checkpoint.name}, after {_step(manifest['facts']['position'])}"
        return f"from {self.checkpoint.name}"


def _step(state: Mapping[str, Any]) -> str:
    return f"step {state['step']} of {state['arm']}"


def write_run_state(directory: RunDirectory, state: Mapping[str, Any], version: int) -> None:
    """Replace the run's state, at the trainer's `version`, once the step's rows are written."""
    rows = {file.name: file.stat().st_size for file in directory.of_steps if file.exists()}
    text = json.dumps({"version": version, "state": state, "rows": rows}).encode()
    summed = b"%s\n%08x" % (text, crc32(text))

    def write() -> None:
        file = os.open(directory.run_state, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with open(file, "wb") as stream:
            stream.write(summed.ljust(os.fstat(file).st_size))

    with_room(directory.run_state, write)


def resume_point(
    directory: RunDirectory, checkpoint: Path | None, position: Position | None = None
) -> ResumePoint:
    """Return where a run goes on whose newest whole checkpoint is `checkpoint`; its rows are whole
    up to `whole`, None for all of them."""
    try:
        version_before = -1 if checkpoint is None else int(checkpoint.name.removeprefix(VERSION))
        saved = json.loads(_summed(directory.run_state.read_bytes()))
        version, state = int(saved["version"]), dict(saved["state"])
        is_complete = all(
            (directory.path / n).stat().st_size >= size for n, size in saved["rows"].items()
        )
        usable = is_complete and version > version_before and directory.stands(state, position)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ResumePoint(checkpoint)
    if not usable:
        return ResumePoint(checkpoint)
    from cartridge_forge.learning.checkpoint import last_version  # imports torch

    is_same = last_version(directory.last_state) == version
    return ResumePoint(checkpoint, state if is_same else None)


def _summed(text: bytes) -> bytes:
    """Return the state's line. Raises ValueError where its checksum differs; a state from before
    there was one has none."""
    line, newline, checksum = text.partition(b"\n")
    if newline and int(checksum, 16) != crc32(line):
        raise ValueError("the state and its checksum are of two steps")
    return line


def newest_checkpoint(directory: RunDirectory) -> Path | None:
    """Return the newest checkpoint, whole or not."""
    return max(directory.checkpoints.glob(f"{VERSION}*"), default=None)
