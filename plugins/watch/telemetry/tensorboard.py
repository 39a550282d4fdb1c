"""Write TensorBoard event files, one TensorBoard run an arm, so that arms share charts.

    <run>/tensorboard/on_policy/events.out.tfevents...
    <run>/tensorboard/offline/...

Records are written at once with TensorBoard's own record writer: its larger writers keep a thread
and a bounded queue, and a full queue would block the run.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from cartridge_forge.plugins.watch.telemetry.hub import evaluated_values, row_values, step_values
from cartridge_forge.protocols.ports import TraceSpan
from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.protocols.records.status import RunStatus
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.run_directory import RunDirectory

FOLDER = "tensorboard"
_counter = itertools.count()


class TensorBoardSink:
    """Write under `folder`, one file for each arm and start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self._arms: dict[str, RecordWriter] = {}
        self._steps: dict[str, int] = {}

    def event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "step":
            self._write(event["arm"], event["step"], step_values(event))
        elif event["event"] == "evaluated":
            arm = event["arm"]
            self._write(arm, self._steps.get(arm, 0), evaluated_values(event))

    def metric(self, row: MetricRow) -> None:
        self._write(row.arm, row.step, row_values(row))

    def span(self, span: TraceSpan) -> None:
        """Ignore the span: it has no scalar."""

    def status(self, status: RunStatus) -> None:
        """Ignore the status: the rows have its scalars."""

    def close(self) -> None:
        for writer in self._arms.values():
            writer.close()

    def _write(self, arm: str, step: int, values: Mapping[str, float]) -> None:
        if arm not in self._arms:
            self._arms[arm] = self._open(arm, step)
        self._steps[arm] = step
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._append(arm, Event(step=step, summary=Summary(value=scalars)))

    def _open(self, arm: str, step: int) -> RecordWriter:
        folder = self._folder / arm
        folder.mkdir(exist_ok=True)
        # TensorBoard reads the files of a run in the order of their names.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        writer = RecordWriter((folder / f"{name}.{next(_counter)}").open("wb"))
        self._arms[arm] = writer
        self._append(arm, Event(file_version="brain.Event:2"))
        # A resumed run repeats some steps: readers then drop the first attempt.
        self._append(arm, Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        return writer

    def _append(self, arm: str, event: Event) -> None:
        event.wall_time = time.time()
        self._arms[arm].write(event.SerializeToString())
        self._arms[arm].flush()


def open_sink(spec: RunSpec, directory: RunDirectory) -> TensorBoardSink:
    """Write TensorBoard's files into the run's directory."""
    return TensorBoardSink(directory.path / FOLDER)
