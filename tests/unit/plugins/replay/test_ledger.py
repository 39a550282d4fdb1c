"""The ledger as a file: torn lines, dead owners, several writers, and kill -9 at any moment."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from replay_setup import a_spec, a_teacher, ledger_rows
from replay_worker import a_settlement
from rooms.teachers.panel_setup import CALL, SPEC, opened

from cartridge_forge.plugins.replay.budget import (
    INTERRUPTED,
    AlreadyAnswered,
    CallLater,
    CallNow,
    SpendTotals,
    TeacherCall,
)
from cartridge_forge.plugins.replay.ledger import SpendLedger
from cartridge_forge.plugins.replay.panel import limits_of
from cartridge_forge.protocols.errors import DataError, RunError


def admitted(ledger: SpendLedger, call: TeacherCall = CALL) -> str:
    admission = ledger.admit(call)
    assert isinstance(admission, CallNow)
    return admission.attempt


def test_what_was_settled_is_known_to_all_and_after_a_restart(path: Path) -> None:
    first, second = opened(path), opened(path)
    attempt = admitted(first)
    assert isinstance(second.admit(CALL), CallLater)
    assert second.totals("run") == SpendTotals(held=5_000, calls=1)
    row = a_settlement(CALL, attempt, 1_234)
    first.settle(row)
    assert second.admit(CALL) == AlreadyAnswered(row)
    assert second.totals("run") == SpendTotals(spent=1_234, calls=1, answered=1)
    first.close()
    second.close()
    third = opened(path)
    assert third.found("k") == row
    assert third.totals("run", "a") == SpendTotals(spent=1_234, calls=1, answered=1)
    third.close()
    assert [r["kind"] for r in ledger_rows(path)] == ["reserved", "settled"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("keep", [0, 1, 40, -2, -1])
def test_a_torn_last_line_is_cut_off(path: Path, keep: int) -> None:
    ledger = opened(path)
    ledger.settle(a_settlement(CALL, admitted(ledger), 1_234))
    ledger.close()
    lines = path.read_bytes().splitlines(keepends=True)
    whole = lines[0]
    path.write_bytes(whole + lines[1][: keep or None] * (keep != 0))
    again = opened(path)
    # The settlement is lost and its owner gone: the call may have cost all that was reserved.
    assert again.totals("run") == SpendTotals(spent=5_000, presumed=5_000, calls=1)
    assert isinstance(again.admit(CALL), CallNow)
    again.close()
    rows = ledger_rows(path)
    assert [r.get("outcome") for r in rows] == [None, INTERRUPTED, None]
    assert path.read_bytes().startswith(whole)


def test_a_line_torn_under_a_reader_s_eyes(path: Path) -> None:
    """A second handle sees half a line, and the whole one once it is there."""
    ledger, reader = opened(path), opened(path)
    attempt = admitted(ledger)
    row = a_settlement(CALL, attempt, 7)
    before = path.read_bytes()
    ledger.settle(row)
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(len(before) + 30)
    assert reader.found("k") is None
    path.write_bytes(whole)
    assert reader.found("k") == row
    ledger.close()
    reader.close()


@pytest.mark.parametrize(
    "damage",
    [b"{}\n", b"garbage\n", b"\xff\n", b"[1]\n", b'{"kind":"settled","schema":2}\n', b"\x00\n"],
)
def test_any_other_damage_is_named_and_nothing_is_overwritten(path: Path, damage: bytes) -> None:
    ledger = opened(path)
    ledger.settle(a_settlement(CALL, admitted(ledger), 1))
    ledger.close()
    good = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(good[0] + damage + good[1])
    with pytest.raises(DataError, match=r"ledger\.jsonl:2: .*restore the file"):
        opened(path)
    assert path.read_bytes() == good[0] + damage + good[1]


def test_a_file_that_stays_locked_is_not_waited_for_without_end(path: Path) -> None:
    ledger = SpendLedger(path, limits_of(SPEC), lock_timeout_s=0.2)
    other = opened(path)
    with other._locked(), pytest.raises(RunError, match=r"stayed locked for 0\.2 s"):
        ledger.admit(CALL)
    assert isinstance(ledger.admit(CALL), CallNow)
    ledger.close()
    other.close()


def test_a_closed_handle_writes_into_nobody_s_file(path: Path, tmp_path: Path) -> None:
    ledger = opened(path)
    attempt = admitted(ledger)
    ledger.close()
    ledger.close()
    before = path.read_bytes()
    others = [(tmp_path / str(i)).open("w+b") for i in range(4)]  # take the numbers of its files
    with pytest.raises(RunError, match="was closed"):
        ledger.settle(a_settlement(CALL, attempt, 1))
    for other in others:
        other.close()
    assert path.read_bytes() == before
    assert [(tmp_path / str(i)).stat().st_size for i in range(4)] == [0] * 4


def test_a_full_disk_makes_no_call(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = opened(path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:20]))
    with pytest.raises(RunError, match="cannot be written"):
        ledger.admit(CALL)
    monkeypatch.undo()
    assert ledger.totals("run") == SpendTotals()
    assert isinstance(ledger.admit(CALL), CallNow)
    ledger.close()
    assert len(ledger_rows(path)) == 1


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_set_moves_no_rate_limit(
    path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    spec = a_spec(a_teacher("a", "http://127.0.0.1:1", requests_per_minute=2))
    now = time.time()
    first = SpendLedger(path, limits_of(spec), lock_timeout_s=5.0)
    attempt = first.admit(TeacherCall("k1", "a", "run", 5))
    assert isinstance(attempt, CallNow)
    row = a_settlement(CALL, attempt.attempt, 5)
    first.settle(replace(row, key="k1", outcome="rate_limited", retry_after_s=7.0))
    monkeypatch.setattr(time, "time", lambda: now + 3600 * hours)
    later = first.admit(TeacherCall("k2", "a", "run", 5))
    assert isinstance(later, CallLater)
    assert 0 < later.seconds <= 7, "its own rows do not move with the clock"
    if hours < 0:  # rows of the future, to a process that starts now
        other = SpendLedger(path, limits_of(spec), lock_timeout_s=5.0)
        later = other.admit(TeacherCall("k3", "a", "run", 5))
        assert isinstance(later, CallLater)
        assert 0 < later.seconds <= 7
        other.close()
    first.close()


def test_a_clock_that_is_set_forward_ages_no_row_past_the_last_look(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas share 2 calls a minute. One makes both; the clock is set an hour forward; the
    other, which looked at the file before, must still wait for the minute's end."""
    spec = a_spec(a_teacher("a", "http://127.0.0.1:1", requests_per_minute=2))
    first, second = (SpendLedger(path, limits_of(spec), lock_timeout_s=5.0) for _ in range(2))
    for key in ("k1", "k2"):
        assert isinstance(first.admit(TeacherCall(key, "a", "run", 5)), CallNow)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    later = second.admit(TeacherCall("k3", "a", "run", 5))
    assert isinstance(later, CallLater)
    assert 50 < later.seconds <= 60
    assert later.why == "rate_limited"
    first.close()
    second.close()
