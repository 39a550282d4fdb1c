"""Test the files of a run: its log, where it goes on, and its copy in a bucket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_mesh import run

from cartridge_forge.plugins.host import run_store
from cartridge_forge.plugins.host.run_store import (
    RunMirror,
    StoredRun,
    fetch,
    is_ahead,
    stored_at,
    stored_names,
    stored_runs,
    take_lease,
)
from cartridge_forge.plugins.host.stored_files import TRAINER, ObjectStore, StoredFolder, StoreError
from cartridge_forge.protocols.errors import CheckpointError, RunError
from cartridge_forge.protocols.files import read_rows
from cartridge_forge.protocols.ports import TraceSpan
from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.protocols.records.status import RunStatus
from cartridge_forge.protocols.spec.services import StoredPlace
from cartridge_forge.services.run_directory import (
    ResumePoint,
    RunDirectory,
    newest_checkpoint,
    resume_point,
    write_run_state,
)
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


STATE = {"arm": "on_policy", "step": 5}
LAST = "after step 5 of on_policy, from the trainer's last state"
CHECKPOINT = "from version-000004, after step 4 of on_policy"


def last_state(stopped_run: RunDirectory, version: int) -> None:
    """Its manifest, as `learning.checkpoint` writes it."""
    stopped_run.last_state.mkdir(exist_ok=True)
    state = json.dumps({"facts": {"version": version}, "files": {}})
    (stopped_run.last_state / "manifest.json").write_text(
        json.dumps({"crc32": "0", "state": state})
    )


@pytest.fixture
def stopped_run(tmp_path: Path) -> RunDirectory:
    """A run that was killed in step 6: it has a checkpoint of step 4 and the rows of 5 steps."""
    stopped_run = RunDirectory.create(tmp_path, "tiny", "spec")
    position = {"arm": "on_policy", "step": 4}
    path = stopped_run.checkpoints / "version-000004"
    path.mkdir()
    (path / "manifest.json").write_text(json.dumps({"facts": {"position": position}}))
    for step in range(1, 6):
        row = MetricRow(
            arm="on_policy", step=step, version=step, kl=0.1, grad_norm=1.0, lr=0.1, tokens=5,
            stale_tokens=0,
        )  # fmt: skip
        stopped_run.append_metric(row)
    write_run_state(stopped_run, STATE, 5)
    last_state(stopped_run, 5)
    return stopped_run


def test_a_run_goes_on_with_the_step_that_it_was_killed_in(stopped_run: RunDirectory) -> None:
    newest = newest_checkpoint(stopped_run)
    assert resume_point(stopped_run, newest) == ResumePoint(newest, STATE)
    assert str(resume_point(stopped_run, newest)) == LAST
    assert str(resume_point(stopped_run, None)) == LAST
    assert resume_point(stopped_run, newest, (0, 5)).state == STATE


@pytest.mark.parametrize("version", [4, 6])
def test_states_of_two_steps_are_not_put_together(stopped_run: RunDirectory, version: int) -> None:
    last_state(stopped_run, version)
    assert str(resume_point(stopped_run, newest_checkpoint(stopped_run))) == CHECKPOINT


@pytest.mark.parametrize("lost", ["rows", "state", "torn", "half", "trainer", "whole", "newer"])
def test_what_a_machine_lost_is_noticed(stopped_run: RunDirectory, lost: str) -> None:
    newest, whole = newest_checkpoint(stopped_run), None
    if lost == "rows":
        stopped_run.metrics.write_bytes(stopped_run.metrics.read_bytes()[:-1])
    elif lost == "state":
        stopped_run.run_state.unlink()
    elif lost == "torn":
        stopped_run.run_state.write_text(stopped_run.run_state.read_text()[:-2])
    elif lost == "half":  # a state of step 6 over half of that of step 5
        old = stopped_run.run_state.read_bytes()
        write_run_state(stopped_run, {**STATE, "step": 6}, 5)
        new = stopped_run.run_state.read_bytes()
        stopped_run.run_state.write_bytes(new[: len(new) // 2] + old[len(new) // 2 :])
        assert json.loads(stopped_run.run_state.read_text().splitlines()[0])["version"] == 5
    elif lost == "trainer":
        (stopped_run.last_state / "manifest.json").write_text("")
    elif lost == "whole":
        whole = (0, 4)
    else:
        newest = stopped_run.checkpoints / "version-000005"
    assert resume_point(stopped_run, newest, whole) == ResumePoint(newest)


def test_a_shorter_state_leaves_nothing_of_a_longer_one(stopped_run: RunDirectory) -> None:
    write_run_state(stopped_run, {**STATE, "more": "x" * 9000}, 5)
    assert resume_point(stopped_run, None).state == {**STATE, "more": "x" * 9000}
    write_run_state(stopped_run, STATE, 5)
    assert resume_point(stopped_run, None).state == STATE


def test_a_state_from_before_checksums_is_read(stopped_run: RunDirectory) -> None:
    stopped_run.run_state.write_text(stopped_run.run_state.read_text().splitlines()[0])
    assert resume_point(stopped_run, None).state == STATE


def test_without_either_a_run_starts_again(stopped_run: RunDirectory) -> None:
    stopped_run.run_state.unlink()
    assert str(resume_point(stopped_run, None)) == "from the start"
    (stopped_run.checkpoints / "version-000004" / "manifest.json").write_text("{")
    assert str(resume_point(stopped_run, newest_checkpoint(stopped_run))) == "from version-000004"


@pytest.fixture
def url(tmp_path: Path) -> str:
    (tmp_path / "bucket").mkdir()
    return f"file://{tmp_path}/bucket"


@pytest.fixture
def run_store_directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs", "clinic", "name: clinic\n")


def stored(url: str, run_store_directory: RunDirectory) -> StoredRun:
    return StoredRun(ObjectStore(url), "clinic", run_store_directory.id)


def mirror(run: StoredRun, run_store_directory: RunDirectory, said: list[str]) -> RunMirror:
    return RunMirror(run_store_directory, run, take_lease(run, said.append), said.append)


def checkpoint(path: Path, name: str) -> None:
    (path / "checkpoints" / name).mkdir()
    (path / "checkpoints" / name / "manifest.json").write_text(name)


def test_a_run_is_stored_and_fetched_elsewhere(
    url: str, run_store_directory: RunDirectory, tmp_path: Path
) -> None:
    run, there = stored(url, run_store_directory), tmp_path / "there"
    copies = mirror(run, run_store_directory, [])
    copies.start()
    checkpoint(run_store_directory.path, "version-000002")
    (run_store_directory.path / "endpoints.json").write_text("{}")
    (run_store_directory.path / "control.token").write_text("a-token-of-this-start")
    (run_store_directory.path / ".hidden").write_text("")
    run_store_directory.append_event("checkpoint", path="version-000002")
    assert copies.end() == ""
    assert [found.id for found in stored_runs(run.store, "clinic")] == [run_store_directory.id]
    assert is_ahead(run, there)
    assert not is_ahead(run, tmp_path / "runs")
    path = fetch(stored_at(f"{url}/clinic/{run_store_directory.id}"), there)
    assert stored_names(path) == stored_names(run_store_directory.path)
    assert not {"endpoints.json", "control.token"} & set(stored_names(path))
    for name in stored_names(path):
        assert (path / name).read_bytes() == (run_store_directory.path / name).read_bytes()
    assert not is_ahead(run, there)

    # It goes on there: this machine is behind, and loses the checkpoint that is gone there.
    checkpoint(path, "version-000004")
    (path / "checkpoints" / "version-000002" / "manifest.json").unlink()
    (path / "checkpoints" / "version-000002").rmdir()
    again = mirror(run, RunDirectory(path), [])
    again.start()
    assert again.end() == ""
    assert is_ahead(run, tmp_path / "runs")
    run_store_directory.run_state.write_text("{}")  # of rows that the store has not
    fetch(run, tmp_path / "runs")
    kept = [folder.name for folder in run_store_directory.checkpoints.iterdir()]
    assert kept == ["version-000004"]


def test_a_checkpoint_of_a_trainer_elsewhere_counts_once_the_events_tell_of_it(
    url: str, run_store_directory: RunDirectory, tmp_path: Path
) -> None:
    run, trainer = stored(url, run_store_directory), tmp_path / "trainer"
    (trainer / "checkpoints").mkdir(parents=True)
    for name in ("version-000002", "version-000004"):
        checkpoint(trainer, name)
    place = StoredPlace(url, f"clinic/{run_store_directory.id}")
    names = [f"checkpoints/version-00000{v}/manifest.json" for v in (2, 4)]
    StoredFolder(run.store, place.within(TRAINER), trainer).push(names)
    run_store_directory.append_event("checkpoint", path="version-000002")
    copies = mirror(run, run_store_directory, [])
    copies.start()
    assert copies.end() == ""
    path = fetch(run, tmp_path / "there")
    assert [folder.name for folder in (path / "checkpoints").iterdir()] == ["version-000002"]


def test_one_command_holds_a_run(
    url: str, run_store_directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said = stored(url, run_store_directory), list[str]()
    lease = take_lease(run, said.append)
    with pytest.raises(RunError, match=r"is held by process \d+ on .*; wait for its end"):
        take_lease(run, said.append)
    # Of another machine: watched for so long, and then taken over.
    record = json.loads((Path(url[7:]) / run.prefix / "lease.json").read_text())
    record |= {"began": "1/2/3", "host": "elsewhere", "pid": 7}
    run.store.put(f"{run.prefix}/lease.json", json.dumps(record).encode())
    monkeypatch.setattr(run_store, "STALE_SECONDS", 0.3)
    second = take_lease(run, said.append)
    assert said == [
        f"run {run.id} in {url} was held by process 7 on elsewhere; it is taken over after 0.3 s "
        "without a heartbeat"
    ]
    lease._beat(1)
    assert lease.lost.startswith(f"the lease of run {run.id} in {url} is held by process ")
    second._beat(1)
    assert second.lost == ""
    second.end()
    take_lease(run, said.append).end()


def test_a_store_that_fails_is_told_once_and_tried_again(
    url: str, run_store_directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said = stored(url, run_store_directory), list[str]()
    monkeypatch.setattr(run_store, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(run_store, "AGAIN_SECONDS", 0.01)
    copies = mirror(run, run_store_directory, said)
    copies.start()
    put, failures = ObjectStore.put, iter([True, True, True])

    def fails(store: ObjectStore, name: str, data: bytes) -> None:
        if next(failures, False):
            raise StoreError("no room in the bucket")
        put(store, name, data)

    monkeypatch.setattr(ObjectStore, "put", fails)
    run_store_directory.append_event("checkpoint", path="version-000002")
    while len(said) < 2:
        assert copies._thread.is_alive()
    assert copies.end() == ""
    assert said == [
        f"no room in the bucket; the run goes on in {run_store_directory.path}",
        f"the run is stored in {url} again",
    ]


def test_what_names_no_run_is_refused(
    url: str, run_store_directory: RunDirectory, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match="names no run; write it as s3://bucket/runs/MESH/RUN"):
        stored_at("runs/x")
    run = stored(url, run_store_directory)
    with pytest.raises(CheckpointError, match=f"there is no run at {url}/clinic/"):
        fetch(run, tmp_path / "there")
