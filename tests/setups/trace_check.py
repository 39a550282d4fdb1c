"""Reads a trace.json as a viewer does and says whether it may be drawn."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Trace:
    """The events of a trace; slices and marks by the name of their lane, in the file's order."""

    slices: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    marks: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    waits: list[tuple[str, int, int]] = field(default_factory=list)  # name, begin, end: us


def read_trace(path: Path, closed: bool = True) -> Trace:
    """The trace, checked: valid JSON (once closed; else but for its end), every lane named once,
    slices of a lane one after the other in time and in the file, waits begun and ended in pairs.
    """
    text = path.read_text(encoding="utf-8")
    if not closed:
        assert not text.rstrip().endswith("]"), "the trace is closed"
        text = text[: text.rindex("\n")].rstrip().rstrip(",") + "]"  # the last line may be torn
    trace, lanes = Trace(), {}
    ends: dict[str, int] = defaultdict(int)
    open_waits: dict[int, dict[str, Any]] = {}
    for event in json.loads(text):
        kind = event["ph"]
        if kind == "M":
            if event["name"] == "thread_name":
                assert event["tid"] not in lanes, f"lane {event['tid']} is named twice"
                assert event["args"]["name"] not in lanes.values()
                lanes[event["tid"]] = event["args"]["name"]
            continue
        assert isinstance(event["ts"], int)
        lane = lanes[event["tid"]]  # named before its first event
        if kind == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= ends[lane], f"{event} overlaps the slice before it on {lane}"
            ends[lane] = event["ts"] + event["dur"]
            trace.slices[lane].append(event)
        elif kind == "i":
            assert event["s"] in ("t", "p")
            trace.marks[lane].append(event)
        elif kind == "b":
            assert event["id"] not in open_waits
            open_waits[event["id"]] = event
        else:
            assert kind == "e", event
            begun = open_waits.pop(event["id"])
            assert (event["name"], event["cat"]) == (begun["name"], begun["cat"])
            trace.waits.append((event["name"], begun["ts"], event["ts"]))
    # A wait is written as two lines: the kill may fall between them.
    assert len(open_waits) <= (0 if closed else 1)
    return trace
