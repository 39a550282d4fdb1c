"""The ledger as a file: torn lines, dead owners, several writers, and kill -9 at any moment."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import replay_worker
from replay_setup import a_spec, a_teacher, ledger_rows, prices, right
from replay_worker import RACE_PAID, RACE_WORST
from rooms.teachers.panel_setup import CALL, opened

from cartridge_forge.plugins.replay.budget import INTERRUPTED, CallLater, CallNow, SpendTotals
from cartridge_forge.plugins.replay.fake_provider.app import FakeProvider, FaultRates
from cartridge_forge.plugins.replay.panel import limits_of

Start = Callable[..., "subprocess.Popen[str]"]


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


def test_a_dead_owner_s_call_counts_in_full_and_may_be_made_again(path: Path, start: Start) -> None:
    worker = start("hold", path)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "CallNow\n"
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


def test_kill_9_and_a_provider_with_idempotency_keys_charges_each_answer_once(
    path: Path, start: Start
) -> None:
    spec = a_spec(a_teacher("a", "http://127.0.0.1:1/v1"))
    slow = FaultRates(latency_s=0.1)
    with FakeProvider(right, prices(spec), slow, idempotent=True) as provider:
        for moment in (1, 4, 8):  # states done before the kill
            worker = start("ask", path, provider.openai_url, COUNT)
            assert worker.stdout is not None
            for _ in range(moment):
                worker.stdout.readline()
            wait_for_a_call(path)
            worker.kill()
            worker.wait()
        last = start("ask", path, provider.openai_url, COUNT)
        out, _ = last.communicate(timeout=60)
        assert len(out.splitlines()) == COUNT
        rows = ledger_rows(path)
        assert [r for r in rows if r.get("outcome") == INTERRUPTED], "no kill fell into a call"
        paid = Counter(s.prompt for s in provider.served if s.nanodollars)
        assert len(paid) == COUNT
        assert set(paid.values()) == {1}
        spent = sum(r["nanodollars"] for r in rows if r["kind"] == "settled")
        assert provider.money() <= spent <= limits_of(spec)["a"].run_cap


def wait_for_a_call(path: Path) -> None:
    """Until a call is reserved and not settled: its request takes a tenth of a second."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        lines = map(json.loads, path.read_bytes().split(b"\n")[:-1])
        settled = Counter(row["attempt"] for row in lines)
        if any(count == 1 for count in settled.values()):
            return
    raise AssertionError("no call was in flight")


def answered_keys(path: Path) -> set[str]:
    lines = path.read_bytes().split(b"\n")[:-1]
    return {r["key"] for r in map(json.loads, lines) if r.get("outcome") == "answered"}
