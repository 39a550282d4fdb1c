"""Write trace.json: the run as Chrome trace events, which Perfetto and chrome://tracing open.

    controller    |rollout      |score  |train  |publish|rollout ...
    generator[0]  |generate |              |load|  |generate |
    generator[1]  |generate   |            |load|  |generate   |
    doc_teacher[0]              |score|
    waiting for generator   |----|                  from the request for a replica to its start

Each replica is a thread of one process. The viewers nest slices of a thread that contain each other
and garble those that merely overlap, so a span that overlaps its thread's last one gets another
thread ("generator[1] (2)"). Waiting is drawn as asynchronous slices, which may overlap.

One event a line, written at once, the comma before it: a kill leaves an array without its end,
which the viewers accept, and `TraceSink` continues a file of an earlier start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.watch.telemetry.hub import epoch_seconds, role_of
from cartridge_forge.protocols.ports import TraceSpan
from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.protocols.records.status import RunStatus
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.run_directory import RunDirectory

NAME = "trace.json"
CONTROLLER = "controller"
PID = 1  # all threads of a run are one process to the viewer
WAIT_MICROSECONDS = 1000  # a shorter wait is routing
_HEAD, _TAIL = b"[\n", b"\n]\n"


class TraceSink:
    """Append trace events to `path`. Memory: one number a thread. Times in the file are whole
    microseconds since the epoch, so that adjacent slices do not overlap by rounding."""

    def __init__(self, path: Path, run: str) -> None:
        self._lanes: dict[str, int] = {}  # name -> tid
        self._ends: dict[str, int] = {}  # name -> end of its last slice
        self._waits = 0
        self._first = True
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._take_up()
        if self._first:
            self._write({"name": "process_name", "ph": "M", "pid": PID, "args": {"name": run}})
        self._lane(CONTROLLER)

    def _take_up(self) -> None:
        """Cut the end off a file of an earlier start, torn or whole, and read its threads."""
        end = 0
        with os.fdopen(os.dup(self._file), "rb") as file:
            file.seek(0)
            if file.readline() == _HEAD:
                end = len(_HEAD)
                for line in file:
                    text = line.strip().rstrip(b",")
                    if not text.endswith(b"}"):
                        break  # torn, or the closing bracket
                    try:
                        event = json.loads(text)
                    except ValueError:
                        break
                    if event["name"] == "thread_name":
                        self._lanes[event["args"]["name"]] = event["tid"]
                    elif event["ph"] == "b":
                        self._waits = event["id"]
                    # The newline and comma after an event belong to the next one.
                    end = end + (0 if self._first else len(b",\n")) + len(text)
                    self._first = False
        os.ftruncate(self._file, end)
        if end == 0:
            os.write(self._file, _HEAD)

    def event(self, event: Mapping[str, Any]) -> None:
        """Write every event but "step" as a mark on its replica's thread, or across all threads."""
        name = event["event"]
        if name == "step":
            return
        facts = {key: v for key, v in event.items() if key not in ("event", "time")}
        lane = event.get("replica", CONTROLLER)
        self._write(
            {
                "name": name, "ph": "i", "s": "p" if lane == CONTROLLER else "t", "pid": PID,
                "tid": self._lane(lane), "ts": round(epoch_seconds(event) * 1e6), "args": facts,
            }
        )  # fmt: skip

    def span(self, span: TraceSpan) -> None:
        begin, end = round(span.begin * 1e6), round(max(span.begin, span.end) * 1e6)
        lane = self._free_lane(span.lane, begin)
        self._ends[lane] = end
        facts = dict(span.facts)
        waited = round(float(facts.get("waited", 0.0)) * 1e6)
        if waited >= WAIT_MICROSECONDS:
            self._waits += 1
            wait = {
                "name": f"waiting for {role_of(span.lane)}", "cat": "wait", "id": self._waits,
                "pid": PID, "tid": self._lane(span.lane),
            }  # fmt: skip
            self._write({**wait, "ph": "b", "ts": begin - waited, "args": facts})
            self._write({**wait, "ph": "e", "ts": begin})
        self._write(
            {
                "name": span.name, "ph": "X", "pid": PID, "tid": self._lane(lane),
                "ts": begin, "dur": end - begin, "args": facts,
            }
        )  # fmt: skip

    def metric(self, row: MetricRow) -> None:
        """Ignore the row: a trace has no losses."""

    def status(self, status: RunStatus) -> None:
        """Ignore the status: the spans show the same."""

    def close(self) -> None:
        os.write(self._file, _TAIL)
        os.close(self._file)

    def _free_lane(self, lane: str, begin: int) -> str:
        """Return the thread, or the first beside it whose last slice has ended by `begin`."""
        name, number = lane, 1
        while self._ends.get(name, begin) > begin:
            number += 1
            name = f"{lane} ({number})"
        return name

    def _lane(self, name: str) -> int:
        if name not in self._lanes:
            tid = self._lanes[name] = len(self._lanes) + 1
            at = {"ph": "M", "pid": PID, "tid": tid}
            self._write({"name": "thread_name", **at, "args": {"name": name}})
            # Without it the viewers sort by name, and put the controller among the replicas.
            order = 0 if role_of(name).startswith(CONTROLLER) else tid
            self._write({"name": "thread_sort_index", **at, "args": {"sort_index": order}})
        return self._lanes[name]

    def _write(self, event: Mapping[str, Any]) -> None:
        text = json.dumps(event, ensure_ascii=False, allow_nan=False).encode()
        # One write a line: a kill tears no line, and nothing is buffered.
        os.write(self._file, text if self._first else b",\n" + text)
        self._first = False


def open_sink(spec: RunSpec, directory: RunDirectory) -> TraceSink:
    """Write the trace into the run's directory."""
    return TraceSink(directory.path / NAME, directory.id)
