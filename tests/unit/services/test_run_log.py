"""The recorder: files first, then sinks and followers, who lose the oldest when they are slow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_mesh import run

from cartridge_forge.protocols.files import read_rows
from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.protocols.records.status import RunStatus
from cartridge_forge.protocols.streams import TraceSpan
from cartridge_forge.services.run_directory import RunDirectory
from cartridge_forge.services.run_log import HELD_EVENTS, RunLog

ROW = MetricRow(
    arm="on_policy", step=1, version=1, kl=0.5, grad_norm=0.1, lr=0.02, tokens=9, stale_tokens=0
)


class ListSink:
    """Keeps what it is told, and whether the file had it by then."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.told: list[tuple[str, Any]] = []

    def event(self, event: Mapping[str, Any]) -> None:
        with self.directory.events.open("rb") as file:
            file.seek(-min(200, file.seek(0, 2)), 2)
            assert json.loads(file.read().splitlines()[-1]) == event
        self.told.append(("event", event["event"]))

    def metric(self, row: MetricRow) -> None:
        assert read_rows(self.directory.metrics)[-1]["step"] == row.step
        self.told.append(("metric", row.step))

    def span(self, span: TraceSpan) -> None:
        self.told.append(("span", span.name))

    def status(self, status: RunStatus) -> None:
        self.told.append(("status", status.stage))

    def close(self) -> None:
        self.told.append(("close", None))


def recorder_in(path: Path) -> tuple[RunLog, ListSink]:
    directory = RunDirectory.create(path, "tiny", "spec")
    sink = ListSink(directory)
    return RunLog(directory, sink), sink


def test_all_that_is_told_goes_to_the_files_and_then_to_the_sinks(tmp_path: Path) -> None:
    recorder, sink = recorder_in(tmp_path)
    recorder.event("run_started", resumed=False)
    recorder.metric(ROW)
    recorder.span(TraceSpan("generator[0]", "generate", 1.0, 2.0, {"outcome": "ok"}))
    recorder.status(RunStatus(stage="here"))
    recorder.close()
    assert sink.told == [
        ("event", "run_started"), ("metric", 1), ("span", "generate"), ("status", "here"),
        ("close", None),
    ]  # fmt: skip


def test_progress_is_what_happened_and_what_ended_well(tmp_path: Path) -> None:
    recorder, _ = recorder_in(tmp_path)
    for outcome, moved in (("lost", 0), ("ok", 1), ("timeout", 1), ("failed", 1)):
        recorder.span(TraceSpan("generator[0]", "generate", 1.0, 2.0, {"outcome": outcome}))
        assert recorder.moved == moved
    recorder.span(TraceSpan("controller", "score", 1.0, 2.0, {"step": 3}))
    recorder.event("paused")
    recorder.status(RunStatus())
    assert recorder.moved == 3


def test_a_request_says_in_which_phase_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([10.0, 13.0, 14.5, 15.0])
    monkeypatch.setattr("cartridge_forge.services.run_log.steady_time", lambda: next(now))
    spans: list[TraceSpan] = []
    recorder, sink = recorder_in(tmp_path)
    sink.span = spans.append  # type: ignore[method-assign]
    request = TraceSpan("generator[0]", "generate", 11.0, 12.0, {"outcome": "ok", "version": 3})
    recorder.span(request)
    recorder.phase("rollout", arm="on_policy", step=4, version=3)
    recorder.span(request)
    recorder.phase("score", arm="on_policy", step=4, version=3)
    recorder.phase("")
    recorder.phase("")
    facts = {"arm": "on_policy", "step": 4, "version": 3}
    assert spans == [
        request,
        TraceSpan("generator[0]", "generate", 11.0, 12.0,
             {"arm": "on_policy", "step": 4, "outcome": "ok", "version": 3}),
        TraceSpan("controller", "rollout", 10.0, 13.0, facts),
        TraceSpan("controller", "score", 13.0, 14.5, facts),
    ]  # fmt: skip


def test_a_follower_gets_the_last_and_then_each_as_it_happens(tmp_path: Path) -> None:
    async def scenario() -> None:
        recorder, _ = recorder_in(tmp_path)
        for step in range(5):
            recorder.event("step", step=step)
        got: dict[int, list[int]] = {0: [], 2: [], 99: []}

        async def follow(replay: int) -> None:
            async for record in recorder.follow(replay):
                got[replay].append(int(record["step"]))

        following = [asyncio.create_task(follow(replay)) for replay in got]
        await asyncio.sleep(1.0)
        assert got == {0: [], 2: [3, 4], 99: [0, 1, 2, 3, 4]}
        recorder.event("step", step=5)
        await asyncio.sleep(1.0)
        following[1].cancel()
        await asyncio.gather(following[1], return_exceptions=True)
        recorder.event("step", step=6)
        recorder.end_streams()
        await asyncio.gather(following[0], following[2])
        assert got == {0: [5, 6], 2: [3, 4, 5], 99: [0, 1, 2, 3, 4, 5, 6]}
        assert not recorder._followers, "who left is not told any more"
        recorder.event("step", step=7)

    run(scenario())


def test_a_slow_follower_loses_the_oldest_and_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        recorder, sink = recorder_in(tmp_path)
        stream = recorder.follow(0)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        recorder.event("step", step=-1)
        assert (await first)["step"] == -1
        for step in range(HELD_EVENTS + 30):  # meanwhile it reads nothing
            recorder.event("step", step=step)
        recorder.end_streams()
        got = [record["step"] async for record in stream]
        # The end takes a place too.
        assert got == list(range(31, HELD_EVENTS + 30))
        assert len(sink.told) == HELD_EVENTS + 31, "only that follower lost them"
        assert len(read_rows(sink.directory.events)) == HELD_EVENTS + 31

    run(scenario())
