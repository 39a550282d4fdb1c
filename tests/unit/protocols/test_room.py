"""What a full disk leaves of a file, and what frees the room for the last words."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cartridge_forge.protocols.files import (
    RESERVE,
    append_rows,
    hold_room,
    read_rows,
    salvage,
    with_room,
)


def full(path: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_full_disk_frees_the_reserve_and_writes_again(tmp_path: Path) -> None:
    hold_room(tmp_path, 4096)
    reserve = tmp_path / RESERVE
    path = tmp_path / "checkpoints" / "last-state" / "manifest.json"
    written = []

    def write() -> str:
        if reserve.exists():
            raise full(path)
        written.append(path)
        return "done"

    assert with_room(path, write) == "done"
    assert written == [path]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_other_errors_and_a_disk_without_a_reserve_are_raised(tmp_path: Path, number: int) -> None:
    tries = []

    def write() -> None:
        tries.append(1)
        raise OSError(number, os.strerror(number))

    if number != errno.ENOSPC:
        hold_room(tmp_path, 4096)
    with pytest.raises(OSError, match=os.strerror(number)):
        with_room(tmp_path / "file", write)
    assert tries == [1]
    assert (tmp_path / RESERVE).exists() == (number != errno.ENOSPC)


def test_rows_that_do_not_fit_leave_no_part_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes what fits, and refuses the rest: the first is no error."""
    path = tmp_path / "rows.jsonl"
    append_rows(path, [{"step": 1}])
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:5]))
    append_rows(path, [{"step": 2}])  # in pieces, and whole
    room = [7]

    def write_until_full(file: int, data: bytes) -> int:
        if not room:
            raise full(path)
        return write(file, data[: room.pop()])

    monkeypatch.setattr(os, "write", write_until_full)
    with pytest.raises(OSError, match="No space left"):
        append_rows(path, [{"step": 3}])
    monkeypatch.undo()
    append_rows(path, [{"step": 4}])
    assert read_rows(path) == [{"step": 1}, {"step": 2}, {"step": 4}]


def test_a_device_without_room_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        append_rows(tmp_path / "rows.jsonl", [{"step": 1}], create=False)


def test_salvage_tells_torn_from_damaged(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert salvage(path) == ([], [], False)
    path.write_bytes(b'{"a": 1}\n{"a\n17\n{"a": 2}')
    assert salvage(path) == ([{"a": 1}, {"a": 2}], [2, 3], False)
    path.write_bytes(b'{"a": 1}\n{"a')
    assert salvage(path) == ([{"a": 1}], [], True)
