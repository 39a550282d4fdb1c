"""Files of a trainer and of teachers that share no directory with the controller."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from cartridge_forge.plugins.library.object_store import ObjectStore, StoreError
from cartridge_forge.plugins.library.stored_files import LedgerFile, TrainerFiles
from cartridge_forge.plugins.library.stored_folder import (
    CONTROLLER,
    TRAINER,
    StoredFolder,
    read_state,
)
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
