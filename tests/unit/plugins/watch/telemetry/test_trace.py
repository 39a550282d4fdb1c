"""trace.json: what lies on which lane, what a kill leaves, and how a resumed run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from telemetry_stream import STEPS, event, tell
from trace_check import read_trace

from cartridge_forge.plugins.watch.telemetry.trace import TraceSink
from cartridge_forge.protocols.streams import TraceSpan

NOW = 1785060942.1


def test_a_lane_for_every_replica_and_the_controller(tmp_path: Path) -> None:
    sink = TraceSink(tmp_path / "trace.json", "run-1")
    tell(sink, NOW)
    sink.close()
    trace = read_trace(tmp_path / "trace.json")
    steps = 2 * STEPS
    assert {lane: len(slices) for lane, slices in trace.slices.items()} == {
        "controller": 4 * steps,
        "generator[0]": 2 * steps,
        "generator[1]": steps,
        "doc_teacher[0]": steps,
        "trainer[0]": steps,
    }
    first = trace.slices["generator[1]"][0]
    assert (first["name"], first["ts"], first["dur"]) == ("generate", 1785060942101000, 180000)
    assert first["args"] == {
        "request": "generator/1/1", "arm": "on_policy", "step": 1, "version": 0, "waited": 0.0,
        "attempt": 1, "outcome": "ok",
    }  # fmt: skip


def test_waiting_ends_where_the_request_begins(tmp_path: Path) -> None:
    sink = TraceSink(tmp_path / "trace.json", "run-1")
    tell(sink, NOW)
    sink.close()
    trace = read_trace(tmp_path / "trace.json")
    assert len(trace.waits) == 2 * STEPS  # the waits of 0 s are not drawn
    assert trace.waits[0] == ("waiting for generator", 1785060942101000, 1785060942201000)
    assert trace.slices["generator[0]"][1]["ts"] == 1785060942201000


def test_deaths_are_marked_on_their_lane_and_checkpoints_across_all(tmp_path: Path) -> None:
    sink = TraceSink(tmp_path / "trace.json", "run-1")
    tell(sink, NOW)
    sink.close()
    marks = read_trace(tmp_path / "trace.json").marks
    assert [(m["name"], m["s"]) for m in marks["generator[1]"]] == [
        ("replica_lost", "t"),
        ("replica_back", "t"),
    ]
    assert marks["generator[1]"][1]["args"]["seconds"] == 1.5
    assert marks["generator[1]"][1]["ts"] - marks["generator[1]"][0]["ts"] == 1_500_000
    names = [m["name"] for m in marks["controller"]]
    assert names == [
        "run_started", *["role_ready"] * 3, *["checkpoint", "evaluated"] * 2
    ]  # fmt: skip
    assert {m["s"] for m in marks["controller"]} == {"p"}


def test_requests_side_by_side_get_lanes_side_by_side(tmp_path: Path) -> None:
    sink = TraceSink(tmp_path / "trace.json", "run-1")
    for begin, end in ((0.0, 0.3), (0.1, 0.4), (0.4, 0.5), (0.45, 0.5)):
        sink.span(TraceSpan("generator[0]", "generate", NOW + begin, NOW + end, {}))
    sink.close()
    slices = read_trace(tmp_path / "trace.json").slices
    assert [s["dur"] for s in slices["generator[0]"]] == [300000, 100000]
    assert [s["dur"] for s in slices["generator[0] (2)"]] == [300000, 50000]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(0, 10), st.floats(0, 3), st.floats(0, 1)),
        max_size=30,
    )
)
def test_no_schedule_makes_slices_overlap(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, float, float, float]]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    sink = TraceSink(path, "run-1")
    for number, begin, spent, waited in spans:
        lane, facts = f"generator[{number}]", {"waited": waited}
        sink.span(TraceSpan(lane, "generate", NOW + begin, NOW + begin + spent, facts))
    sink.close()
    trace = read_trace(path)
    assert sum(map(len, trace.slices.values())) == len(spans)
    assert len(trace.waits) == sum(round(waited * 1e6) >= 1000 for *_, waited in spans)


@pytest.mark.parametrize("torn", ["", ",", ",\n", ',\n{"name": "gen', ',\n{"ph": "X", "args": {}'])
def test_a_resumed_run_goes_on_after_the_last_whole_event(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "trace.json"
    first = TraceSink(path, "run-1")
    tell(first, NOW)  # no close: killed
    os.close(first._file)
    whole = read_trace(path, closed=False)
    with path.open("a") as file:
        file.write(torn)
    again = TraceSink(path, "run-1")
    tell(again, NOW + 100)
    again.close()
    trace = read_trace(path)
    assert set(trace.slices) == set(whole.slices)  # the same lanes, not a second set
    assert all(len(trace.slices[lane]) == 2 * len(whole.slices[lane]) for lane in whole.slices)
    assert len(trace.waits) == 2 * len(whole.waits)


def test_a_closed_trace_is_taken_up_too(tmp_path: Path) -> None:
    for start in range(3):
        sink = TraceSink(tmp_path / "trace.json", "run-1")
        sink.event(event("checkpoint", NOW + start, step=start))
        sink.close()
    marks = read_trace(tmp_path / "trace.json").marks["controller"]
    assert [m["args"]["step"] for m in marks] == [0, 1, 2]


def test_what_a_kill_leaves_opens(tmp_path: Path) -> None:
    code = (
        "import itertools, sys\n"
        "from pathlib import Path\n"
        "from telemetry_stream import tell\n"
        "from cartridge_forge.plugins.watch.telemetry.trace import TraceSink\n"
        "sink = TraceSink(Path(sys.argv[1]), 'run-1')\n"
        "for i in itertools.count():\n"
        "    tell(sink, 1785060942.1 + 100 * i)\n"
        "    print(i, flush=True)\n"
    )
    path = tmp_path / "trace.json"
    writer = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    for _ in range(3):
        writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    writer.communicate(timeout=10)
    trace = read_trace(path, closed=False)
    assert len(trace.slices["trainer[0]"]) >= 3 * 2 * STEPS
