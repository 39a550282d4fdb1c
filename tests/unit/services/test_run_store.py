"""Runs in a store: found, fetched, held by one command, and copied while they go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cartridge_forge.plugins.library import run_mirror, run_store
from cartridge_forge.plugins.library.object_store import ObjectStore, StoreError
from cartridge_forge.plugins.library.run_mirror import RunMirror, stored_names
from cartridge_forge.plugins.library.run_store import (
    StoredRun,
    fetch,
    is_ahead,
    stored_at,
    stored_runs,
    take_lease,
)
from cartridge_forge.plugins.library.stored_folder import TRAINER, StoredFolder
from cartridge_forge.protocols.errors import CheckpointError, RunError
from cartridge_forge.protocols.spec.services import StoredPlace
from cartridge_forge.services.run_directory import RunDirectory


@pytest.fixture
def url(tmp_path: Path) -> str:
    (tmp_path / "bucket").mkdir()
    return f"file://{tmp_path}/bucket"


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs", "clinic", "name: clinic\n")


def stored(url: str, directory: RunDirectory) -> StoredRun:
    return StoredRun(ObjectStore(url), "clinic", directory.id)


def mirror(run: StoredRun, directory: RunDirectory, said: list[str]) -> RunMirror:
    return RunMirror(directory, run, take_lease(run, said.append), said.append)


def checkpoint(path: Path, name: str) -> None:
    (path / "checkpoints" / name).mkdir()
    (path / "checkpoints" / name / "manifest.json").write_text(name)


def test_a_run_is_stored_and_fetched_elsewhere(
    url: str, directory: RunDirectory, tmp_path: Path
) -> None:
    run, there = stored(url, directory), tmp_path / "there"
    copies = mirror(run, directory, [])
    copies.start()
    checkpoint(directory.path, "version-000002")
    (directory.path / "endpoints.json").write_text("{}")
    (directory.path / "control.token").write_text("a-token-of-this-start")
    (directory.path / ".hidden").write_text("")
    directory.append_event("checkpoint", path="version-000002")
    assert copies.end() == ""
    assert [found.id for found in stored_runs(run.store, "clinic")] == [directory.id]
    assert is_ahead(run, there)
    assert not is_ahead(run, tmp_path / "runs")
    path = fetch(stored_at(f"{url}/clinic/{directory.id}"), there)
    assert stored_names(path) == stored_names(directory.path)
    assert not {"endpoints.json", "control.token"} & set(stored_names(path))
    for name in stored_names(path):
        assert (path / name).read_bytes() == (directory.path / name).read_bytes()
    assert not is_ahead(run, there)

    # It goes on there: this machine is behind, and loses the checkpoint that is gone there.
    checkpoint(path, "version-000004")
    (path / "checkpoints" / "version-000002" / "manifest.json").unlink()
    (path / "checkpoints" / "version-000002").rmdir()
    again = mirror(run, RunDirectory(path), [])
    again.start()
    assert again.end() == ""
    assert is_ahead(run, tmp_path / "runs")
    directory.run_state.write_text("{}")  # of rows that the store has not
    fetch(run, tmp_path / "runs")
    kept = [folder.name for folder in directory.checkpoints.iterdir()]
    assert kept == ["version-000004"]


def test_a_checkpoint_of_a_trainer_elsewhere_counts_once_the_events_tell_of_it(
    url: str, directory: RunDirectory, tmp_path: Path
) -> None:
    run, trainer = stored(url, directory), tmp_path / "trainer"
    (trainer / "checkpoints").mkdir(parents=True)
    for name in ("version-000002", "version-000004"):
        checkpoint(trainer, name)
    place = StoredPlace(url, f"clinic/{directory.id}")
    names = [f"checkpoints/version-00000{v}/manifest.json" for v in (2, 4)]
    StoredFolder(run.store, place.within(TRAINER), trainer).push(names)
    directory.append_event("checkpoint", path="version-000002")
    copies = mirror(run, directory, [])
    copies.start()
    assert copies.end() == ""
    path = fetch(run, tmp_path / "there")
    assert [folder.name for folder in (path / "checkpoints").iterdir()] == ["version-000002"]


def test_one_command_holds_a_run(
    url: str, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said = stored(url, directory), list[str]()
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
    url: str, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said = stored(url, directory), list[str]()
    monkeypatch.setattr(run_mirror, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(run_mirror, "AGAIN_SECONDS", 0.01)
    copies = mirror(run, directory, said)
    copies.start()
    put, failures = ObjectStore.put, iter([True, True, True])

    def fails(store: ObjectStore, name: str, data: bytes) -> None:
        if next(failures, False):
            raise StoreError("no room in the bucket")
        put(store, name, data)

    monkeypatch.setattr(ObjectStore, "put", fails)
    directory.append_event("checkpoint", path="version-000002")
    while len(said) < 2:
        assert copies._thread.is_alive()
    assert copies.end() == ""
    assert said == [
        f"no room in the bucket; the run goes on in {directory.path}",
        f"the run is stored in {url} again",
    ]


def test_what_names_no_run_is_refused(url: str, directory: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="names no run; write it as s3://bucket/runs/MESH/RUN"):
        stored_at("runs/x")
    run = stored(url, directory)
    with pytest.raises(CheckpointError, match=f"there is no run at {url}/clinic/"):
        fetch(run, tmp_path / "there")
