"""A folder kept in a store: whole at every moment, and each part written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from cartridge_forge.plugins.library import stored_folder
from cartridge_forge.plugins.library.object_store import MissingError, ObjectStore, StoreError
from cartridge_forge.plugins.library.stored_folder import NOTHING, StoredFolder, pull, read_state
from cartridge_forge.protocols.errors import CheckpointError


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


@pytest.fixture
def store(bucket: Path) -> ObjectStore:
    return ObjectStore(f"file://{bucket}")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "a.jsonl").write_bytes(b"0123456789")
    (tmp_path / "run" / "checkpoints" / "b").write_bytes(b"same")
    (tmp_path / "run" / "checkpoints" / "c").write_bytes(b"same")
    return tmp_path / "run"


def parts(bucket: Path) -> list[int]:
    return sorted(file.stat().st_size for file in (bucket / "w" / "parts").iterdir())


def test_what_grows_is_written_by_its_last_part_and_what_goes_is_removed(
    store: ObjectStore, bucket: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_folder, "PART_BYTES", 4)
    folder = StoredFolder(store, "w", run)
    names = ["a.jsonl", "checkpoints/b", "checkpoints/c"]
    assert folder.push(names) == 10 + 4, "two equal files are one part"
    assert folder.push(names) == 0
    assert folder.state.serial == 1, "nothing new is no new state"
    with (run / "a.jsonl").open("ab") as file:
        file.write(b"ABC")
    assert folder.push(names) == 5, "89ABC is 89AB and C; 0123 and 4567 are there"
    assert parts(bucket) == [1, 4, 4, 4, 4], "89 is gone"
    assert folder.push(["checkpoints/c"]) == 0
    assert parts(bucket) == [4]
    assert read_state(store, "w").serial == 3

    pull(store, "w", tmp_path / "there", folder.state, ["checkpoints/c"])
    assert (tmp_path / "there" / "checkpoints" / "c").read_bytes() == b"same"


def test_a_writer_that_ends_half_way_leaves_the_state_before(
    store: ObjectStore, bucket: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StoredFolder(store, "w", run).push(["a.jsonl"])
    (run / "a.jsonl").write_bytes(b"another")

    def dies(*_: object) -> None:
        raise StoreError("gone")

    monkeypatch.setattr(ObjectStore, "replace", dies)
    with pytest.raises(StoreError, match="gone"):
        StoredFolder(store, "w", run).push(["a.jsonl"])
    state = read_state(store, "w")
    pull(store, "w", tmp_path / "there", state, ["a.jsonl"])
    assert (tmp_path / "there" / "a.jsonl").read_bytes() == b"0123456789"


def test_of_two_writers_the_second_is_refused(store: ObjectStore, run: Path) -> None:
    one, two = StoredFolder(store, "w", run), StoredFolder(store, "w", run)
    assert (one.state, two.state) == (NOTHING, NOTHING)
    one.push(["a.jsonl"])
    with pytest.raises(StoreError, match=r"w of file://.* was written by another"):
        two.push(["checkpoints/b"])
    two.push(["checkpoints/b"])  # once it has read what is there
    with pytest.raises(StoreError, match="was written by another"):
        one.push(["a.jsonl", "checkpoints/c"])


def test_what_is_damaged_or_gone_is_told(
    store: ObjectStore, bucket: Path, run: Path, tmp_path: Path
) -> None:
    folder = StoredFolder(store, "w", run)
    folder.push(["a.jsonl"])
    (part,) = (bucket / "w" / "parts").iterdir()
    part.write_bytes(b"012345678X")
    with pytest.raises(CheckpointError, match=r"a\.jsonl has a damaged part 8"):
        pull(store, "w", tmp_path / "there", folder.state, ["a.jsonl"])
    part.unlink()
    with pytest.raises(MissingError, match=r"a\.jsonl was replaced meanwhile"):
        pull(store, "w", tmp_path / "there", folder.state, ["a.jsonl"])
    assert not [*(tmp_path / "there").iterdir()], "no part of a file"
    out = stored_folder.StoredState(1, {"../x": {"size": 0, "parts": []}})
    with pytest.raises(CheckpointError, match=r"a file's path must be in it: got \.\./x"):
        pull(store, "w", tmp_path / "there", out, ["../x"])
    (bucket / "w" / "state.json").write_text('{"schema": 9}')
    with pytest.raises(CheckpointError, match=r"is no state of a stored run \(schema 9\)"):
        read_state(store, "w")


def test_a_store_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"records.store file://{tmp_path}/none: "):
        ObjectStore(f"file://{tmp_path}/none")
