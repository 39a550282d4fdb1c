"""Decide from the rows of a spend ledger whether one more call may be made.

Money is counted in whole nanodollars. This module does no IO. All processes that share a ledger add
the same rows in the same order, so they agree on answers, money, rates and breakers.
`plugins.replay.ledger` holds the file and its lock.

    ReservedCall   written before a call: reserves its worst case
    SettledCall    written after it: its cost and its answer

A reservation of a dead process is settled by the next process that finds it, as "interrupted" and
at its worst case, because the provider may have charged it.

Rates and breakers count on a monotonic clock of this process: the caller says when each row was
written on that clock. The `time` of a row is a record; a clock that is set back moves no limit.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

from cartridge_forge.plugins.chat.messages import NANO, TeacherUsage
from cartridge_forge.plugins.replay.spec import PriceSpec

WINDOW_S = 60.0  # of `requests_per_minute`

ANSWERED = "answered"
INTERRUPTED = "interrupted"
# The provider may have answered, and charged. The next attempt repeats the request, by its key.
UNKNOWN = (INTERRUPTED, "timeout", "cut_off")

# Tokens that a provider may add to a request: its chat template, and its instructions for JSON.
OVERHEAD_TOKENS = 1024


@dataclass(frozen=True)
class ReservedCall:
    """Reserve money for one attempt of a call. `ReservedCall("a1", "41d0...", "opus", "run-7",
    "0c9e...", 5120000, 1785060942.1)`: attempt a1 of this call may cost 5,120,000 nanodollars.
    `owner` is the ledger handle that makes it. `request` is the provider's idempotency key: the id
    of the first of the attempts of a call whose ends are unknown."""

    attempt: str
    key: str
    teacher: str
    run: str
    owner: str
    nanodollars: int
    time: float
    request: str = ""  # of rows of earlier versions


@dataclass(frozen=True)
class SettledCall:
    """Record how an attempt ended. `outcome` is ANSWERED (never called again) or the failure;
    `usage` is None where the provider did not report it. `usable`: the answer was a vote. `tries`
    counts the attempts for this vote so far; `retry_after_s` is the provider's wish."""

    attempt: str
    key: str
    teacher: str
    run: str
    outcome: str
    nanodollars: int
    usage: TeacherUsage | None
    raw: str
    refused: bool
    usable: bool
    latency_s: float
    tries: int
    retry_after_s: float
    time: float


@dataclass(frozen=True)
class SpendLimits:
    """Bound the calls of one teacher in one run; money in nanodollars."""

    run_cap: int
    teacher_cap: int
    concurrency: int
    requests_per_minute: int | None
    breaker_failures: int
    breaker_cooldown_s: float


@dataclass(frozen=True)
class TeacherCall:
    """Describe a call of `teacher` with the key `key` and its worst case in nanodollars."""

    key: str
    teacher: str
    run: str
    nanodollars: int


@dataclass(frozen=True)
class CallNow:
    """Admit the call: `attempt` is reserved, and sent with the idempotency key `request`."""

    attempt: str
    request: str


@dataclass(frozen=True)
class AlreadyAnswered:
    """Return the stored answer in place of a call."""

    settled: SettledCall


@dataclass(frozen=True)
class CallLater:
    """Defer the call by `seconds`; `why` becomes the vote's error."""

    seconds: float
    why: str


@dataclass(frozen=True)
class CallRefused:
    """Refuse the call; `why` becomes the vote's error."""

    why: str


Admission = CallNow | AlreadyAnswered | CallLater | CallRefused


@dataclass(frozen=True)
class CircuitBreaker:
    """Stop calling a teacher that returns nothing usable.

    closed --failures in a row--> open --cooldown--> half open: one probe
      ^-------------- a usable answer ---------------|     `--failure--> open
    """

    failures: int = 0
    opened: float | None = None
    probe: str = ""

    def begun(self, attempt: str) -> CircuitBreaker:
        """Return the breaker after an attempt started."""
        return self if self.opened is None else replace(self, probe=attempt)

    def ended(self, settled: SettledCall, limit: int, at: float) -> CircuitBreaker:
        """Return the breaker after an attempt ended at `at`, in the seconds of `admit`."""
        if settled.usable:
            return CircuitBreaker()
        probing = bool(self.probe) and settled.attempt == self.probe
        if settled.outcome == INTERRUPTED:  # the caller died: not the teacher's failure
            return replace(self, probe="") if probing else self
        if self.opened is not None:  # calls begun before it opened change nothing
            return replace(self, opened=at, probe="") if probing else self
        failures = self.failures + 1
        return CircuitBreaker(failures, at if failures >= limit else None)

    def lets_through(self, now: float, cooldown_s: float) -> bool:
        """Return whether a call may start now."""
        return self.opened is None or (not self.probe and now - self.opened >= cooldown_s)


@dataclass
class TeacherAccount:
    """Hold one teacher's state over all runs of the ledger: open calls, recent starts, and its
    breaker."""

    open: dict[str, ReservedCall] = field(default_factory=dict)
    begun: deque[float] = field(default_factory=deque)
    not_before: float = -math.inf
    breaker: CircuitBreaker = CircuitBreaker()
    overran: bool = False


@dataclass(frozen=True)
class SpendTotals:
    """Sum up money and calls of one run, or of one teacher in it; money in nanodollars. `spent` is
    settled, of which `presumed` is the worst case of calls of unknown cost; `held` is reserved for
    calls in flight. `calls` counts attempts, `answered` those with an answer."""

    spent: int = 0
    presumed: int = 0
    held: int = 0
    calls: int = 0
    answered: int = 0


class Budget:
    """Add up ledger rows and admit calls. `limits` are those of the teachers that this process
    calls."""

    def __init__(self, limits: dict[str, SpendLimits]) -> None:
        self.limits = limits
        self.answers: dict[str, SettledCall] = {}
        self.last: dict[str, SettledCall] = {}
        self.in_flight: dict[str, ReservedCall] = {}
        self._unknown: dict[str, str] = {}  # by call: the request whose end is unknown
        self._accounts: dict[str, TeacherAccount] = {}
        self._totals: dict[tuple[str, str], SpendTotals] = {}

    def add(self, row: ReservedCall | SettledCall, at: float) -> None:
        """Add one row of the ledger, written at `at` in the seconds of `admit`; a second settlement
        of an attempt is ignored."""
        account = self.account(row.teacher)
        if isinstance(row, ReservedCall):
            account.open[row.attempt] = self.in_flight[row.attempt] = row
            account.begun.append(at)
            account.breaker = account.breaker.begun(row.attempt)
            self._count(row, held=row.nanodollars, calls=1)
            return
        reserved = self.in_flight.pop(row.attempt, None)
        if reserved is None:  # settled twice: only the first counts
            return
        del account.open[row.attempt]
        limits = self.limits.get(row.teacher)
        account.breaker = account.breaker.ended(row, limits.breaker_failures if limits else 1, at)
        account.not_before = max(account.not_before, at + row.retry_after_s)
        account.overran |= row.nanodollars > reserved.nanodollars
        self.last[row.key] = row
        self._unknown.pop(row.key, None)
        if row.outcome in UNKNOWN:
            self._unknown[row.key] = reserved.request or reserved.attempt
        if answered := row.outcome == ANSWERED:
            self.answers[row.key] = row
        self._count(
            row, held=-reserved.nanodollars, spent=row.nanodollars, answered=int(answered),
            presumed=row.nanodollars if row.usage is None else 0,
        )  # fmt: skip

    def admit(self, call: TeacherCall, now: float) -> Admission:
        """Return whether the call may be made at `now`, in seconds of a monotonic clock. CallNow
        has no attempt yet, and a request only if one is repeated: the ledger assigns them."""
        if call.key in self.answers:
            return AlreadyAnswered(self.answers[call.key])
        account, limits = self.account(call.teacher), self.limits[call.teacher]
        if account.overran:  # a call cost more than its worst case: prices or bounds are wrong
            return CallRefused("price_exceeded")
        if not account.breaker.lets_through(now, limits.breaker_cooldown_s):
            return CallRefused("circuit_open")
        if any(reserved.key == call.key for reserved in account.open.values()):
            return CallLater(0.05, "deadline")
        if now < account.not_before:
            return CallLater(account.not_before - now, "rate_limited")
        if len(account.open) >= limits.concurrency:
            return CallLater(0.02, "deadline")
        if limits.requests_per_minute is not None:
            while account.begun and account.begun[0] <= now - WINDOW_S:
                account.begun.popleft()
            if len(account.begun) >= limits.requests_per_minute:
                return CallLater(account.begun[0] + WINDOW_S - now, "rate_limited")
        return self._afford(call, limits)

    def account(self, teacher: str) -> TeacherAccount:
        return self._accounts.setdefault(teacher, TeacherAccount())

    def totals(self, run: str, teacher: str = "") -> SpendTotals:
        """Return the totals of a run, or of one teacher in it."""
        return self._totals.get((run, teacher), SpendTotals())

    def _afford(self, call: TeacherCall, limits: SpendLimits) -> Admission:
        for teacher, cap, why in (
            ("", limits.run_cap, "budget_run"),
            (call.teacher, limits.teacher_cap, "budget_teacher"),
        ):
            totals = self.totals(call.run, teacher)
            if totals.spent + call.nanodollars > cap:
                return CallRefused(why)
            if totals.spent + totals.held + call.nanodollars > cap:
                return CallLater(0.1, why)  # calls in flight may cost less than they reserved
        return CallNow("", self._unknown.get(call.key, ""))

    def _count(self, row: ReservedCall | SettledCall, **more: int) -> None:
        """Add to the totals of the row's run, and to those of its teacher in it."""
        for teacher in ("", row.teacher):
            totals = self.totals(row.run, teacher)
            counted = {name: getattr(totals, name) + n for name, n in more.items()}
            self._totals[row.run, teacher] = replace(totals, **counted)


def per_token(dollars_per_million: float) -> int:
    """Return the nanodollars of one token: 1.25 dollars per million are 1250."""
    return round(dollars_per_million * 1000)


def cost(usage: TeacherUsage, prices: PriceSpec) -> int:
    """Return the nanodollars of a call by its usage."""
    cached = prices.input if prices.cached is None else prices.cached
    return (
        usage.input_tokens * per_token(prices.input)
        + usage.cached_tokens * per_token(cached)
        + usage.output_tokens * per_token(prices.output)
    )


def worst_case(sent_bytes: int, max_tokens: int, prices: PriceSpec) -> int:
    """Return the nanodollars that a call cannot exceed with any tokenizer: no token is shorter than
    a byte, and no answer longer than `max_tokens`."""
    dearest = max(prices.input, prices.cached or 0.0)
    return (sent_bytes + OVERHEAD_TOKENS) * per_token(dearest) + max_tokens * per_token(
        prices.output
    )


def nanodollars(dollars: float) -> int:
    """Return a cap in nanodollars, rounded down."""
    return math.floor(round(dollars * NANO, 3))


def reported(dollars: float) -> int:
    """Return a cost that a provider reported in nanodollars, rounded up."""
    return math.ceil(round(dollars * NANO, 3))
