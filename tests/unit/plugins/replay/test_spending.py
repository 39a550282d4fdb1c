"""What teachers cost, read beside who writes the ledger."""

from __future__ import annotations

from pathlib import Path

from cartridge_forge.plugins.replay.budget import (
    ANSWERED,
    CallNow,
    SettledCall,
    SpendLimits,
    TeacherCall,
)
from cartridge_forge.plugins.replay.ledger import RunSpending, SpendLedger

NO_LIMITS = SpendLimits(10**12, 10**12, 8, None, 5, 30.0)


def reserve(ledger: SpendLedger, teacher: str, key: str) -> str:
    admission = ledger.admit(TeacherCall(key, teacher, "run", 10**6))
    assert isinstance(admission, CallNow)
    return admission.attempt


def settled(
    attempt: str, teacher: str, nanodollars: int, outcome: str, usable: bool
) -> SettledCall:
    return SettledCall(
        attempt, "k", teacher, "run", outcome, nanodollars, None, "", False, usable, 0.1, 1, 0.0,
        1.0,
    )  # fmt: skip


def test_the_ledger_is_followed_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "teachers.jsonl"
    spending = RunSpending(path)
    assert spending.total() == {"calls": {}, "dollars": {}}
    ledger = SpendLedger(path, dict.fromkeys(("gpt", "opus"), NO_LIMITS))
    first, second = reserve(ledger, "opus", "1"), reserve(ledger, "opus", "2")
    assert spending.total() == {"calls": {}, "dollars": {}}  # nothing has ended yet
    ledger.settle(settled(first, "opus", 250_000_000, ANSWERED, True))
    assert spending.total()["dollars"] == {"opus": 0.25}
    ledger.settle(settled(first, "opus", 999_000_000, ANSWERED, True))  # only the first counts
    ledger.settle(settled(second, "opus", 0, "http_500", False))
    third = reserve(ledger, "gpt", "3")
    ledger.settle(settled(third, "gpt", 125_000_000, ANSWERED, False))
    ledger.close()
    expected = {
        "calls": {"gpt": {"unusable": 1}, "opus": {"answered": 1, "http_500": 1}},
        "dollars": {"gpt": 0.125, "opus": 0.25},
    }
    assert spending.total() == expected
    assert RunSpending(path).total() == expected  # as after a resume


def test_a_row_that_is_still_being_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "teachers.jsonl"
    ledger = SpendLedger(path, {"opus": NO_LIMITS})
    attempt = reserve(ledger, "opus", "1")
    ledger.settle(settled(attempt, "opus", 500_000_000, ANSWERED, True))
    ledger.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    spending = RunSpending(path)
    assert spending.total() == {"calls": {}, "dollars": {}}
    path.write_bytes(whole)
    assert spending.total()["dollars"] == {"opus": 0.5}
