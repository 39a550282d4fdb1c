"""The ledger as a file: torn lines, dead owners, several writers, and kill -9 at any moment."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import replay_worker
from replay_house import a_spec, a_teacher, ledger_rows, prices, right
from replay_worker import RACE_PAID, RACE_WORST, a_settlement

from protocols.errors import DataError, RunError
from teachers.budget import (
    INTERRUPTED,
    AlreadyAnswered,
    CallLater,
    CallNow,
    SpendTotals,
    TeacherCall,
)
from teachers.fake_provider.app import FakeProvider, FaultRates
from teachers.ledger import SpendLedger
from teachers.panel import limits_of

SPEC = a_spec(a_teacher("a", "http://127.0.0.1:1"))
CALL = TeacherCall("k", "a", "run", 5_000)
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts workers, and lets none outlive the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*args: object) -> "subprocess.Popen[str]":
        command = [sys.executable, replay_worker.__file__, *map(str, args)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(worker)
        return worker

    yield begin
    for worker in started:
        worker.kill()
        worker.communicate()


def opened(path: Path) -> SpendLedger:
    return SpendLedger(path, limits_of(SPEC), lock_timeout_s=5.0)


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


@pytest.mark.mesh  # spawns processes
def test_a_dead_owner_s_call_counts_in_full_and_may_be_made_again(path: Path, start: Start) -> None:
    worker = start("hold", path)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "Go\n"
    ledger = opened(path)
    assert isinstance(ledger.admit(CALL), CallLater)  # it lives, and asks just that
    worker.send_signal(signal.SIGSTOP)
    assert isinstance(ledger.admit(CALL), CallLater)  # silent is not dead
    worker.kill()
    worker.wait()
    assert isinstance(ledger.admit(CALL), CallNow)
    assert ledger.totals("run") == SpendTotals(spent=5_000, presumed=5_000, held=5_000, calls=2)
    ledger.close()
    opened(path).close()
    assert list(path.with_name("ledger.jsonl.owners").iterdir()) == []


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


@pytest.mark.mesh  # spawns processes
def test_writers_in_several_processes_never_exceed_the_cap_together(
    path: Path, start: Start
) -> None:
    """A cap of 500,000; a call holds 10,000 and costs 3,000: the last is admitted at 489,000."""
    workers = [start("race", path, 60) for _ in range(4)]
    done = [int(worker.communicate(timeout=60)[0]) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0, 0]
    rows = ledger_rows(path)
    spent = held = 0
    for row in rows:  # the order of the file is the order of the decisions
        if row["kind"] == "reserved":
            held += row["nanodollars"]
            assert spent + held <= 500_000
        else:
            held -= RACE_WORST
            spent += row["nanodollars"]
    assert held == 0
    assert spent == sum(done) * RACE_PAID
    assert len({row["attempt"] for row in rows}) == sum(done) == len(rows) // 2
    # 240 were wanted. Sequential work would pay for 164; while others hold their worst cases, a
    # process that is told to wait goes on to its next call here, so that some are not made.
    assert 100 <= sum(done) <= 164


COUNT = 24


@pytest.mark.mesh  # spawns processes
def test_kill_9_in_the_middle_and_nothing_is_paid_twice(path: Path, start: Start) -> None:
    """Killed four times at different moments, the work is finished at last, and every answer that
    was on disk before a kill was bought once."""
    spec = a_spec(a_teacher("a", "http://127.0.0.1:1/v1"))
    with FakeProvider(right, prices(spec), FaultRates(latency_s=0.05)) as provider:
        kills = 0
        for moment in (1, 3, 4, 8):  # states done before the kill
            worker = start("ask", path, provider.openai_url, COUNT)
            assert worker.stdout is not None
            for _ in range(moment):
                worker.stdout.readline()
            time.sleep(0.013 * kills)  # somewhere within a call
            worker.kill()
            worker.wait()
            kills += 1
            settled = answered_keys(path)
            before = Counter(served.prompt for served in provider.served)
            assert settled
        last = start("ask", path, provider.openai_url, COUNT)
        out, _ = last.communicate(timeout=60)
        assert sorted(line.split() for line in out.splitlines()) == sorted(
            [str(i), "pair"] for i in range(COUNT)
        )
        rows = ledger_rows(path)
        answers = [r for r in rows if r.get("outcome") == "answered"]
        assert len(answers) == len({r["key"] for r in answers}) == COUNT  # each bought once
        reservations = {r["attempt"]: r for r in rows if r["kind"] == "reserved"}
        served = {s.attempt: s for s in provider.served}
        assert served.keys() <= reservations.keys()  # no call without its reservation on disk
        # What was asked more often than once had been cut off by a kill, three at a time at most.
        again = {s.attempt for s in provider.served} - {r["attempt"] for r in answers}
        interrupted = {r["attempt"]: r for r in rows if r.get("outcome") == INTERRUPTED}
        assert again <= interrupted.keys()
        assert len(interrupted) <= 3 * kills
        assert sum(before.values()) < len(provider.served)
        # Every nanodollar of the provider's is in the ledger: to the last where the answer came,
        # within the worst case where a kill came first.
        for row in answers:
            assert row["nanodollars"] == served[row["attempt"]].nanodollars
        for attempt, row in interrupted.items():
            assert row["nanodollars"] == reservations[attempt]["nanodollars"]
            if attempt in served:
                assert served[attempt].nanodollars <= row["nanodollars"]


def answered_keys(path: Path) -> set[str]:
    lines = path.read_bytes().split(b"\n")[:-1]
    return {r["key"] for r in map(json.loads, lines) if r.get("outcome") == "answered"}
