"""Test files and folders in an object store."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from cartridge_forge.plugins.host import stored_files
from cartridge_forge.plugins.host.stored_files import (
    CONTROLLER,
    NOTHING,
    TRAINER,
    LedgerFile,
    MissingError,
    ObjectStore,
    StoredFolder,
    StoreError,
    TrainerFiles,
    pull,
    read_state,
)
from cartridge_forge.protocols.errors import CheckpointError
from cartridge_forge.protocols.spec.services import StoredPlace


@pytest.fixture
def place(tmp_path: Path) -> StoredPlace:
    (tmp_path / "bucket").mkdir()
    return StoredPlace(f"file://{tmp_path}/bucket", "clinic/run")


def checkpoint(run: Path, name: str) -> Path:
    path = run / "checkpoints" / name
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(name)
    return path


def stored(place: StoredPlace) -> list[str]:
    return sorted(read_state(ObjectStore(place.url), place.within(TRAINER)).files)


def test_the_newest_checkpoint_stays_stored_until_the_one_after_the_next(
    place: StoredPlace, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    files = TrainerFiles(place, run)
    checkpoint(run, "version-000002")
    files.keep_checkpoints()
    shutil.rmtree(run / "checkpoints" / "version-000002")  # train.keep_checkpoints is 1
    checkpoint(run, "version-000004")
    files.keep_checkpoints()
    names = [f"checkpoints/version-00000{v}/manifest.json" for v in (2, 4, 6)]
    assert stored(place) == names[:2], "the controller's rows may not reach 4"
    shutil.rmtree(run / "checkpoints" / "version-000004")
    checkpoint(run, "version-000006")
    files.keep_checkpoints()
    assert stored(place) == names[1:]

    there = TrainerFiles(place, tmp_path / "there")
    path = tmp_path / "there" / "checkpoints" / "version-000004"
    there.fetch_checkpoint(path)
    assert (path / "manifest.json").read_text() == "version-000004"
    assert [p.name for p in path.parent.iterdir()] == ["version-000004"]


def test_a_checkpoint_of_a_run_that_began_on_one_host_is_fetched(
    place: StoredPlace, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path / "whole", "version-000002")
    folder = StoredFolder(ObjectStore(place.url), place.within(CONTROLLER), tmp_path / "whole")
    folder.push(["checkpoints/version-000002/manifest.json"])
    files = TrainerFiles(place, tmp_path / "run")
    files.fetch_checkpoint(tmp_path / "run" / "checkpoints" / path.name)
    assert (tmp_path / "run" / "checkpoints" / path.name / "manifest.json").is_file()


def test_a_new_trainer_has_the_last_state_that_is_stored(
    place: StoredPlace, tmp_path: Path
) -> None:
    first = TrainerFiles(place, tmp_path / "first")
    state = tmp_path / "first" / "checkpoints" / "last-state"
    state.mkdir()
    (state / "manifest.json").write_text("of step 3")
    (state / "manifest.json.partial").write_text("half")
    first.keep_last_state()
    stale = tmp_path / "second" / "checkpoints" / "last-state"
    stale.mkdir(parents=True)
    (stale / "old.safetensors").write_text("of a run before")
    TrainerFiles(place, tmp_path / "second").fetch_last_state()
    assert {p.name: p.read_text() for p in stale.iterdir()} == {"manifest.json": "of step 3"}


def test_a_ledger_follows_its_teachers_and_a_failing_store_holds_up_nobody(
    place: StoredPlace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger = tmp_path / "one" / "teachers.jsonl"
    here = LedgerFile(place, ledger)
    here.fetch()  # there is none
    ledger.write_text('{"paid": 1}\n')
    here.keep()
    there = tmp_path / "two" / "teachers.jsonl"
    LedgerFile(place, there).fetch()
    assert there.read_text() == '{"paid": 1}\n'

    calls = []

    def fails(*words: object) -> None:
        calls.append(words)
        raise StoreError("no room in the bucket")

    monkeypatch.setattr(ObjectStore, "put", fails)
    ledger.write_text('{"paid": 2}\n')
    with caplog.at_level(logging.WARNING):
        here.keep()
        here.keep()
    assert len(calls) == 1, "not again at once"
    (said,) = caplog.messages
    # Monarch puts the actor before it, in a process that has used it.
    assert said.endswith(f"no room in the bucket; kept in {tmp_path}/one")


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


@pytest.fixture
def store(bucket: Path) -> ObjectStore:
    return ObjectStore(f"file://{bucket}")


@pytest.fixture
def stored_folder_run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "a.jsonl").write_bytes(b"0123456789")
    (tmp_path / "run" / "checkpoints" / "b").write_bytes(b"same")
    (tmp_path / "run" / "checkpoints" / "c").write_bytes(b"same")
    return tmp_path / "run"


def parts(bucket: Path) -> list[int]:
    return sorted(file.stat().st_size for file in (bucket / "w" / "parts").iterdir())


def test_what_grows_is_written_by_its_last_part_and_what_goes_is_removed(
    store: ObjectStore,
    bucket: Path,
    stored_folder_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored_files, "PART_BYTES", 4)
    folder = StoredFolder(store, "w", stored_folder_run)
    names = ["a.jsonl", "checkpoints/b", "checkpoints/c"]
    assert folder.push(names) == 10 + 4, "two equal files are one part"
    assert folder.push(names) == 0
    assert folder.state.serial == 1, "nothing new is no new state"
    with (stored_folder_run / "a.jsonl").open("ab") as file:
        file.write(b"ABC")
    assert folder.push(names) == 5, "89ABC is 89AB and C; 0123 and 4567 are there"
    assert parts(bucket) == [1, 4, 4, 4, 4], "89 is gone"
    assert folder.push(["checkpoints/c"]) == 0
    assert parts(bucket) == [4]
    assert read_state(store, "w").serial == 3

    pull(store, "w", tmp_path / "there", folder.state, ["checkpoints/c"])
    assert (tmp_path / "there" / "checkpoints" / "c").read_bytes() == b"same"


def test_a_writer_that_ends_half_way_leaves_the_state_before(
    store: ObjectStore,
    bucket: Path,
    stored_folder_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    StoredFolder(store, "w", stored_folder_run).push(["a.jsonl"])
    (stored_folder_run / "a.jsonl").write_bytes(b"another")

    def dies(*_: object) -> None:
        raise StoreError("gone")

    monkeypatch.setattr(ObjectStore, "replace", dies)
    with pytest.raises(StoreError, match="gone"):
        StoredFolder(store, "w", stored_folder_run).push(["a.jsonl"])
    state = read_state(store, "w")
    pull(store, "w", tmp_path / "there", state, ["a.jsonl"])
    assert (tmp_path / "there" / "a.jsonl").read_bytes() == b"0123456789"


def test_of_two_writers_the_second_is_refused(store: ObjectStore, stored_folder_run: Path) -> None:
    one, two = (
        StoredFolder(store, "w", stored_folder_run),
        StoredFolder(store, "w", stored_folder_run),
    )
    assert (one.state, two.state) == (NOTHING, NOTHING)
    one.push(["a.jsonl"])
    with pytest.raises(StoreError, match=r"w of file://.* was written by another"):
        two.push(["checkpoints/b"])
    two.push(["checkpoints/b"])  # once it has read what is there
    with pytest.raises(StoreError, match="was written by another"):
        one.push(["a.jsonl", "checkpoints/c"])


def test_what_is_damaged_or_gone_is_told(
    store: ObjectStore, bucket: Path, stored_folder_run: Path, tmp_path: Path
) -> None:
    folder = StoredFolder(store, "w", stored_folder_run)
    folder.push(["a.jsonl"])
    (part,) = (bucket / "w" / "parts").iterdir()
    part.write_bytes(b"012345678X")
    with pytest.raises(CheckpointError, match=r"a\.jsonl has a damaged part 8"):
        pull(store, "w", tmp_path / "there", folder.state, ["a.jsonl"])
    part.unlink()
    with pytest.raises(MissingError, match=r"a\.jsonl was replaced meanwhile"):
        pull(store, "w", tmp_path / "there", folder.state, ["a.jsonl"])
    assert not [*(tmp_path / "there").iterdir()], "no part of a file"
    out = stored_files.StoredState(1, {"../x": {"size": 0, "parts": []}})
    with pytest.raises(CheckpointError, match=r"a file's path must be in it: got \.\./x"):
        pull(store, "w", tmp_path / "there", out, ["../x"])
    (bucket / "w" / "state.json").write_text('{"schema": 9}')
    with pytest.raises(CheckpointError, match=r"is no state of a stored run \(schema 9\)"):
        read_state(store, "w")


def test_a_store_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"records.store file://{tmp_path}/none: "):
        ObjectStore(f"file://{tmp_path}/none")
