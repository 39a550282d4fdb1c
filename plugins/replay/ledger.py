"""Keep teacher calls in one append-only file: spend, answers, rate limits and circuit breakers.

    ledger.jsonl          a ReservedCall line before each call, a SettledCall line after; fsynced
    ledger.jsonl.owners/  one file for each open handle, locked until its process ends

All replicas and other processes share the file. Each admission takes its lock, reads the rows that
others appended, decides by the budget (`plugins.replay.budget`), and appends its reservation before
it releases the lock. Reservations therefore have one order, and no two processes can both spend the
last dollar. Rows are on disk before a call is made and before its answer is used.

A locked file and not an actor holds the budget, because the file survives every process, kill -9
included, without restart or handover. A replacement replica needs only the path; the next run, or a
look-up without any network, reads the same bytes. The price is that all sharers are on one host (or
a file system with a correct flock), and two flushes to disk a call: some milliseconds, beside the
hundreds that a teacher takes.

An attempt of which a kill, a timeout or a lost connection left no answer is counted at its worst
case. The next one has an id of its own and the same idempotency key, so that a provider that knows
such keys answers it without another charge.

A kill can tear the last line only, and the next process to lock the file cuts it off. If it was a
reservation, its call was not made; if a settlement, the reservation stays open. Open reservations
of dead owners are settled as "interrupted", at their worst case.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.chat.messages import NANO, TeacherUsage
from cartridge_forge.plugins.replay.budget import (
    ANSWERED,
    INTERRUPTED,
    Admission,
    Budget,
    CallNow,
    ReservedCall,
    SettledCall,
    SpendLimits,
    SpendTotals,
    TeacherCall,
)
from cartridge_forge.protocols.errors import DataError, RunError
from cartridge_forge.protocols.files import flush

SCHEMA = 1
LOCK_TIMEOUT_S = 30.0
LOCK_POLL_S = 0.002
UNUSABLE = "unusable"  # answered, but not with a vote


class SpendLedger:
    """Open a ledger file for one process. Methods block for milliseconds; from a coroutine call
    them in a thread. Raises DataError for a damaged file or one that is not a ledger, RunError for
    one that cannot be locked or written."""

    def __init__(
        self, path: Path, limits: dict[str, SpendLimits], lock_timeout_s: float = LOCK_TIMEOUT_S
    ) -> None:
        self.path = path
        self._books = Budget(limits)
        self._offset = 0
        self._lines = 0
        self._looked = -math.inf  # when the file was read last
        self._lock_timeout_s = lock_timeout_s
        self._mine = threading.Lock()
        self._owner = uuid.uuid4().hex
        self._owners = path.with_name(f"{path.name}.owners")
        self._owners.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            with self._locked():
                flush(path.parent)
                self._alive = self._claim()
                self._sweep()
        except BaseException:
            os.close(self._file)
            raise

    def admit(self, call: TeacherCall) -> Admission:
        """Return CallNow once the worst case is reserved on disk; or the stored answer; or why
        not."""
        with self._locked():
            self._settle_the_dead()
            admission = self._books.admit(call, time.monotonic())
            if not isinstance(admission, CallNow):
                return admission
            attempt = uuid.uuid4().hex
            request = admission.request or attempt
            whose = (call.key, call.teacher, call.run, self._owner)
            self._append(ReservedCall(attempt, *whose, call.nanodollars, time.time(), request))
            return CallNow(attempt, request)

    def settle(self, settled: SettledCall) -> None:
        """Write how an attempt ended. Reserved money that it did not cost is free again."""
        with self._locked():
            self._append(settled)

    def give_back(self, attempt: str) -> None:
        """Settle a reservation at no cost, because no call followed it."""
        with self._locked():
            self._append(interrupted(self._books.in_flight[attempt], 0))

    def found(self, key: str, failures: bool = False) -> SettledCall | None:
        """Return the answer to a call, if the ledger has it; with `failures`, else its last
        failure."""
        with self._locked(write=False):
            books = self._books
            return books.answers.get(key) or (books.last.get(key) if failures else None)

    def totals(self, run: str, teacher: str = "") -> SpendTotals:
        """Return money and calls of a run so far, over all processes; or of one teacher in it."""
        with self._locked():
            self._settle_the_dead()
            return self._books.totals(run, teacher)

    def close(self) -> None:
        """Close the handle. Its calls in flight count as interrupted."""
        with self._mine:
            if self._file < 0:
                return
            (self._owners / self._owner).unlink(missing_ok=True)
            os.close(self._alive)
            os.close(self._file)
            self._file = -1  # the system reuses the number for the next file

    # -- the file, under its lock ---------------------------------------------------------------

    @contextmanager
    def _locked(self, write: bool = True) -> Iterator[None]:
        """Hold the file's lock, with the budget up to date."""
        with self._mine:  # threads of one process share one open file, and therefore its lock
            if self._file < 0:
                raise RunError(f"{self.path} was closed by this process; open it anew")
            self._lock(fcntl.LOCK_EX if write else fcntl.LOCK_SH)
            try:
                self._read(cut=write)
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _lock(self, kind: int) -> None:
        deadline = time.monotonic() + self._lock_timeout_s
        while True:
            try:
                fcntl.flock(self._file, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"{self.path} stayed locked for {self._lock_timeout_s:g} s: a process that "
                        "shares it stands still; end that one"
                    ) from None
                time.sleep(LOCK_POLL_S)

    def _read(self, cut: bool) -> None:
        """Add the rows appended since the last read; with `cut`, cut off a torn last line."""
        size = os.fstat(self._file).st_size
        fresh = os.pread(self._file, size - self._offset, self._offset)
        complete, now = fresh.rfind(b"\n") + 1, time.monotonic()
        for line in fresh[:complete].split(b"\n")[:-1]:
            self._lines += 1
            row = self._row(line)
            # Another process wrote it, maybe before the clock was set: no row is of the future, or
            # older than the last look at the file.
            at = now - max(0.0, time.time() - row.time)
            self._books.add(row, max(at, self._looked))
        self._offset, self._looked = self._offset + complete, now
        if cut and complete < len(fresh):
            os.ftruncate(self._file, self._offset)
            os.fsync(self._file)

    def _row(self, line: bytes) -> ReservedCall | SettledCall:
        try:
            plain: dict[str, Any] = json.loads(line)
            kind, schema = plain.pop("kind"), plain.pop("schema")
            if schema != SCHEMA:
                raise ValueError(f"schema {schema}")
            if kind == "reserved":
                return ReservedCall(**plain)
            if plain["usage"] is not None:
                plain["usage"] = TeacherUsage(**plain["usage"])
            return SettledCall(**plain)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"{self.path}:{self._lines}: every line must be a row of the call ledger, schema "
                f"{SCHEMA}; got another ({type(error).__name__}); restore the file, or name a "
                "new one and pay for its calls again"
            ) from error

    def _append(self, row: ReservedCall | SettledCall) -> None:
        kind = "reserved" if isinstance(row, ReservedCall) else "settled"
        line = json.dumps({"kind": kind, "schema": SCHEMA, **asdict(row)}, allow_nan=False) + "\n"
        data = line.encode()
        try:
            if os.write(self._file, data) != len(data):
                raise OSError("the disk is full")
            os.fsync(self._file)
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error}; make room for it") from error
        self._lines += 1
        self._offset += len(data)
        self._books.add(row, time.monotonic())

    # -- owners ---------------------------------------------------------------------------------

    def _claim(self) -> int:
        """Lock a file that the kernel unlocks when this process ends."""
        file = os.open(self._owners / self._owner, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        return file

    def _lives(self, owner: str) -> bool:
        if owner == self._owner:
            return True
        try:
            file = os.open(self._owners / owner, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False

    def _settle_the_dead(self) -> None:
        open_rows = list(self._books.in_flight.values())
        dead = {owner for owner in {row.owner for row in open_rows} if not self._lives(owner)}
        for row in open_rows:
            if row.owner in dead:
                self._append(interrupted(row, row.nanodollars))

    def _sweep(self) -> None:
        """Remove the files of dead owners."""
        for file in self._owners.iterdir():
            if not self._lives(file.name):
                with suppress(FileNotFoundError):
                    file.unlink()


def interrupted(row: ReservedCall, nanodollars: int) -> SettledCall:
    """Return the settlement of a reservation whose call never ended."""
    return SettledCall(
        row.attempt, row.key, row.teacher, row.run, INTERRUPTED, nanodollars, None, "",
        False, False, 0.0, 1, 0.0, time.time(),
    )  # fmt: skip


class RunSpending:
    """Follow the ledger of a run while others write it, without a lock. `total` covers all its
    rows, including those of earlier starts."""

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger
        self._offset = 0
        self._open: set[str] = set()  # unsettled attempts: only the first settlement counts
        self._calls: dict[str, Counter[str]] = {}
        self._nanodollars: Counter[str] = Counter()

    def total(self) -> dict[str, dict[str, Any]]:
        """Return settled attempts by outcome and their cost: `{"calls": {"opus": {"answered": 4,
        "http_500": 1}}, "dollars": {"opus": 0.0123}}`."""
        self._read()
        return {
            "calls": {teacher: dict(calls) for teacher, calls in sorted(self._calls.items())},
            "dollars": {name: spent / NANO for name, spent in sorted(self._nanodollars.items())},
        }

    def _read(self) -> None:
        """Count the rows appended since the last call."""
        if not self._ledger.is_file():
            return
        with self._ledger.open("rb") as file:
            file.seek(self._offset)
            fresh = file.read()
        complete = fresh.rfind(b"\n") + 1  # the rest is still being written
        for line in fresh[:complete].splitlines():
            self._add(json.loads(line))
        self._offset += complete

    def _add(self, row: dict[str, Any]) -> None:
        if row["kind"] == "reserved":
            self._open.add(row["attempt"])
        elif row["attempt"] in self._open:
            self._open.remove(row["attempt"])
            answered = row["outcome"] == ANSWERED
            outcome = UNUSABLE if answered and not row["usable"] else row["outcome"]
            self._calls.setdefault(row["teacher"], Counter())[outcome] += 1
            self._nanodollars[row["teacher"]] += row["nanodollars"]
