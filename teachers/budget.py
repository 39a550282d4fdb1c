"""The books: what the rows of a ledger come to, and whether one more call may be made.

Pure. Every process that shares a ledger folds the same rows in the same order, so that all of them
know the same answers, money, rates and breakers; `teachers.ledger` holds the file and its lock.

    Reserved   written before a call: its worst case is spoken for
    Settled    written after: what it cost, and what was answered

A reservation whose process died is settled by whoever notices, as "interrupted" and at its worst
case, for nobody knows what the provider did with it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from protocols.teacher_replay import Usage

WINDOW_S = 60.0  # of `requests_per_minute`

ANSWERED = "answered"
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Reserved:
    """`Reserved("a1", "41d0...", "opus", "run-7", "0c9e...", 5120000, 1785060942.1)`: attempt a1
    of this call may cost 5,120,000 nanodollars. `owner` is the ledger handle that makes it."""

    attempt: str
    key: str
    teacher: str
    run: str
    owner: str
    nanodollars: int
    time: float


@dataclass(frozen=True)
class Settled:
    """How an attempt ended. `outcome` is ANSWERED (never asked again) or what failed; `usage` is
    None where the provider did not say. `usable`: the answer was a vote. `tries` counts the
    attempts of this asking so far; `retry_after_s` is the provider's wish."""

    attempt: str
    key: str
    teacher: str
    run: str
    outcome: str
    nanodollars: int
    usage: Usage | None
    raw: str
    refused: bool
    usable: bool
    latency_s: float
    tries: int
    retry_after_s: float
    time: float


@dataclass(frozen=True)
class Limits:
    """What bounds the calls of one teacher; money in nanodollars, for one run."""

    run_cap: int
    teacher_cap: int
    concurrency: int
    requests_per_minute: int | None
    breaker_failures: int
    breaker_cooldown_s: float


@dataclass(frozen=True)
class Call:
    """What is asked for: a call of `teacher` known by `key`, worst case in nanodollars."""

    key: str
    teacher: str
    run: str
    nanodollars: int


@dataclass(frozen=True)
class Go:
    """Make the call: `attempt` is reserved."""

    attempt: str


@dataclass(frozen=True)
class Have:
    """It was answered before."""

    settled: Settled


@dataclass(frozen=True)
class Wait:
    """Not now. `seconds` until it is worth asking again; `why` becomes the vote's error."""

    seconds: float
    why: str


@dataclass(frozen=True)
class Refuse:
    """Not at all. `why` becomes the vote's error."""

    why: str


Admission = Go | Have | Wait | Refuse


@dataclass(frozen=True)
class Breaker:
    """Leaves a teacher alone that gives nothing usable.

    closed --failures in a row--> open --cooldown--> half open: one probe
      ^-------------- a usable answer ---------------|     `--failure--> open
    """

    failures: int = 0
    opened: float | None = None
    probe: str = ""

    def begun(self, attempt: str) -> Breaker:
        return self if self.opened is None else replace(self, probe=attempt)

    def ended(self, settled: Settled, limit: int) -> Breaker:
        if settled.usable:
            return Breaker()
        probing = bool(self.probe) and settled.attempt == self.probe
        if settled.outcome == INTERRUPTED:  # our own death says nothing of the teacher
            return replace(self, probe="") if probing else self
        if self.opened is not None:  # calls begun before it opened change nothing
            return replace(self, opened=settled.time, probe="") if probing else self
        failures = self.failures + 1
        return Breaker(failures, settled.time if failures >= limit else None)

    def lets_through(self, now: float, cooldown_s: float) -> bool:
        return self.opened is None or (not self.probe and now - self.opened >= cooldown_s)


@dataclass
class Account:
    """One teacher over all runs of the ledger: who asks it now, since when, and how it fares."""

    open: dict[str, Reserved] = field(default_factory=dict)
    begun: deque[float] = field(default_factory=deque)
    not_before: float = 0.0
    breaker: Breaker = Breaker()
    overran: bool = False


@dataclass(frozen=True)
class Totals:
    """Money and calls of one run, or of one teacher in it; money in nanodollars.

    `spent` is settled, of which `presumed` is the worst case of calls whose cost nobody said;
    `held` is reserved for calls in flight. `calls` counts attempts, `answered` those that were.
    """

    spent: int = 0
    presumed: int = 0
    held: int = 0
    calls: int = 0
    answered: int = 0


class Books:
    """The fold. `limits` are this process's own, of the teachers it asks."""

    def __init__(self, limits: dict[str, Limits]) -> None:
        self.limits = limits
        self.answers: dict[str, Settled] = {}
        self.last: dict[str, Settled] = {}
        self.in_flight: dict[str, Reserved] = {}
        self._accounts: dict[str, Account] = {}
        self._totals: dict[tuple[str, str], Totals] = {}

    def add(self, row: Reserved | Settled) -> None:
        account = self.account(row.teacher)
        if isinstance(row, Reserved):
            account.open[row.attempt] = self.in_flight[row.attempt] = row
            account.begun.append(row.time)
            account.breaker = account.breaker.begun(row.attempt)
            self._count(row, held=row.nanodollars, calls=1)
            return
        reserved = self.in_flight.pop(row.attempt, None)
        if reserved is None:  # settled twice: only the first counts
            return
        del account.open[row.attempt]
        limits = self.limits.get(row.teacher)
        account.breaker = account.breaker.ended(row, limits.breaker_failures if limits else 1)
        account.not_before = max(account.not_before, row.time + row.retry_after_s)
        account.overran |= row.nanodollars > reserved.nanodollars
        self.last[row.key] = row
        if answered := row.outcome == ANSWERED:
            self.answers[row.key] = row
        self._count(
            row, held=-reserved.nanodollars, spent=row.nanodollars, answered=int(answered),
            presumed=row.nanodollars if row.usage is None else 0,
        )  # fmt: skip

    def admit(self, call: Call, now: float) -> Admission:
        """Whether the call may be made now. Go has no attempt yet: it is the ledger's to write."""
        if call.key in self.answers:
            return Have(self.answers[call.key])
        account, limits = self.account(call.teacher), self.limits[call.teacher]
        if account.overran:  # it cost more than its worst case: prices or bounds are wrong
            return Refuse("price_exceeded")
        if not account.breaker.lets_through(now, limits.breaker_cooldown_s):
            return Refuse("circuit_open")
        if any(reserved.key == call.key for reserved in account.open.values()):
            return Wait(0.05, "deadline")
        if now < account.not_before:
            return Wait(account.not_before - now, "rate_limited")
        if len(account.open) >= limits.concurrency:
            return Wait(0.02, "deadline")
        if limits.requests_per_minute is not None:
            while account.begun and account.begun[0] <= now - WINDOW_S:
                account.begun.popleft()
            if len(account.begun) >= limits.requests_per_minute:
                return Wait(account.begun[0] + WINDOW_S - now, "rate_limited")
        return self._afford(call, limits)

    def account(self, teacher: str) -> Account:
        return self._accounts.setdefault(teacher, Account())

    def totals(self, run: str, teacher: str = "") -> Totals:
        """Of the run; or of one teacher in it."""
        return self._totals.get((run, teacher), Totals())

    def _afford(self, call: Call, limits: Limits) -> Admission:
        for teacher, cap, why in (
            ("", limits.run_cap, "budget_run"),
            (call.teacher, limits.teacher_cap, "budget_teacher"),
        ):
            totals = self.totals(call.run, teacher)
            if totals.spent + call.nanodollars > cap:
                return Refuse(why)
            if totals.spent + totals.held + call.nanodollars > cap:
                return Wait(0.1, why)  # calls in flight may give some of theirs back
        return Go("")

    def _count(self, row: Reserved | Settled, **more: int) -> None:
        """Add to the totals of the row's run, and to those of its teacher in it."""
        for teacher in ("", row.teacher):
            totals = self.totals(row.run, teacher)
            counted = {name: getattr(totals, name) + n for name, n in more.items()}
            self._totals[row.run, teacher] = replace(totals, **counted)
