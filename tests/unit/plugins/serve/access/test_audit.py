"""The audit log cannot be grown without bound by who has no key."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.plugins.chat.wire.errors import ApiError
from cartridge_forge.plugins.serve.access.audit import NOBODY, AuditLog


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_refusals_of_nobody_are_written_at_a_bounded_rate_and_counted(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "audit.jsonl"
    audit = AuditLog(str(path), False, clock)
    for _ in range(5_000):
        audit.refused(NOBODY, "10.0.0.9", path="/v1/models", code="invalid_api_key")
    assert len(path.read_bytes().splitlines()) == 60
    audit.refused("ward", "10.0.0.7", path="/v1/chat/completions", code="cartridge_not_permitted")
    audit.write("asked", "ward", "10.0.0.7", request="chatcmpl-1")
    clock.now += 12.0  # two more, at 10 a minute
    for _ in range(5):
        audit.refused(NOBODY, "10.0.0.9", path="/v1/models", code="invalid_api_key")
    audit.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    told = [(r["event"], r["key"], r.get("unwritten")) for r in rows[60:]]
    assert told == [
        ("refused", "ward", 4_940),
        ("asked", "ward", None),
        ("refused", NOBODY, None),
        ("refused", NOBODY, None),
        ("refused", NOBODY, 3),
    ]


def test_a_row_of_nobody_is_short_whatever_was_asked(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(str(path), False)
    audit.refused(NOBODY, "f" * 45, path="/" * 200, code="unknown_origin")
    audit.close()
    assert len(path.read_bytes()) < 500


def rows_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def most_bytes(most: int) -> Iterator[None]:
    """No file grows beyond so many bytes: a write ends there, as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("room", [0, 1, 40, 100])
def test_a_row_that_a_full_disk_cut_spoils_no_other(tmp_path: Path, room: int) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(str(path), False)
    audit.write("asked", "ward", None, request="1")
    with most_bytes(path.stat().st_size + room):
        for _ in range(3):
            with pytest.raises(ApiError, match="nothing is served without it"):
                audit.write("asked", "ward", None, request="x" * 200)
    audit.write("asked", "ward", None, request="2")
    audit.close()
    assert [row["request"] for row in rows_of(path)] == ["1", "2"]


@pytest.mark.parametrize("torn", [b'{"time": "2', b"x", b'{"request": "0"}'])
def test_a_log_that_ends_within_a_row_goes_on_with_a_line_of_its_own(
    tmp_path: Path, torn: bytes
) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(torn)
    audit = AuditLog(str(path), False)
    for number in "12":
        audit.write("asked", "ward", None, request=number)
    audit.close()
    first, *others = path.read_bytes().splitlines()
    assert first == torn
    assert [json.loads(line)["request"] for line in others] == ["1", "2"]


def test_a_file_that_is_gone_or_moved_is_begun_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, moved = tmp_path / "logs" / "audit.jsonl", tmp_path / "audit.1"
    audit = AuditLog(str(path), False)
    audit.write("asked", "ward", None, request="1")
    path.rename(moved)
    audit.write("asked", "ward", None, request="2")
    assert [rows_of(p)[0]["request"] for p in (moved, path)] == ["1", "2"]
    path.unlink()
    audit.write("asked", "ward", None, request="3")
    assert [row["request"] for row in rows_of(path)] == ["3"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(caplog.records) == 2
    shutil.rmtree(path.parent)
    for _ in range(2):  # nothing is served without a log
        with pytest.raises(ApiError) as refused:
            audit.write("asked", "ward", None, request="4")
        assert (refused.value.status_code, refused.value.code) == (503, "audit_unavailable")
    path.parent.mkdir()
    audit.write("asked", "ward", None, request="5")
    audit.close()
    assert [row["request"] for row in rows_of(path)] == ["5"]
