"""Limit what waits or runs, by its cost, and compute Retry-After. Pure except for its clock.

Admission   all requests together: sequences and tokens at a time
KeyQuota    one API key: requests at a time, tokens of a minute
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cartridge_forge.plugins.chat.wire.errors import ApiError, bad_request

REMEMBERED = 64  # completion times that the rate is measured over
LONGEST_WAIT = 60  # seconds: the largest Retry-After
QUOTA_SECONDS = 60.0


@dataclass(frozen=True)
class RequestCost:
    """Bound a request before anything is sampled: `sequences` decoded at a time, `tokens` read and
    sampled in all. `of` names the field that decides it."""

    sequences: int
    tokens: int
    of: str = "n"


@dataclass
class TokenReservation:
    """Hold the tokens that a request reserved, and those that it turned out to use."""

    tokens: int
    used: int = 0


class Admission:
    """Admit at most `most` sequences and `most_tokens` tokens at a time, and measure the rate of
    the sequences that ended last. A key within its share, these divided by the keys that have
    requests here, is admitted all the same: what others hold keeps it out by no more."""

    def __init__(
        self, most: int, most_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.most, self.most_tokens, self._clock = most, most_tokens, clock
        self.pending = self.tokens = 0
        self._of_key: dict[str, tuple[int, int]] = {}  # sequences and tokens, of keys that have any
        self._ends: deque[float] = deque(maxlen=REMEMBERED)

    @contextmanager
    def let_in(self, cost: RequestCost, key: str = "") -> Iterator[None]:
        """Count `cost` as pending for a key inside the block. Raises ApiError 400 for a request
        that never fits, 429 for one that does not fit now."""
        if cost.sequences > self.most:
            raise bad_request(
                f"one request asks for {cost.sequences} sequences at a time, and http.max_pending "
                f"is {self.most}; send fewer prompts, a smaller n, or smaller forge.options",
                cost.of,
                "too_costly",
            )
        if cost.tokens > self.most_tokens:
            raise bad_request(
                f"one request may cost {cost.tokens} tokens, read and sampled, and "
                f"http.max_pending_tokens is {self.most_tokens}; lower max_tokens or n, or with a "
                "strategy set forge.budget or smaller forge.options",
                cost.of,
                "too_costly",
            )
        shared = self._has_share(cost, key)
        if self.pending + cost.sequences > self.most and not shared:
            raise self._full(cost, f"{self.pending} sequences wait or run, and {self.most} may")
        if self.tokens + cost.tokens > self.most_tokens and not shared:
            why = f"requests for {self.tokens} tokens wait or run, and {self.most_tokens} may"
            raise self._full(cost, why)
        self._count(cost, key, 1)
        try:
            yield
        finally:
            self._count(cost, key, -1)
            # Of a wide request the memory holds no more than REMEMBERED ends.
            self._ends.extend([self._clock()] * min(cost.sequences, REMEMBERED))

    def _has_share(self, cost: RequestCost, key: str) -> bool:
        """Return whether a request is within the share of its key."""
        active = len({key, *self._of_key})
        sequences, tokens = self._of_key.get(key, (0, 0))
        return (
            sequences + cost.sequences <= self.most // active
            and tokens + cost.tokens <= self.most_tokens // active
        )

    def _count(self, cost: RequestCost, key: str, sign: int) -> None:
        self.pending += sign * cost.sequences
        self.tokens += sign * cost.tokens
        sequences, tokens = self._of_key.pop(key, (0, 0))
        counts = sequences + sign * cost.sequences, tokens + sign * cost.tokens
        if any(counts):
            self._of_key[key] = counts

    def rate(self) -> float:
        """Return the sequences that ended per second, over the last 64; 0 while fewer than two
        ended."""
        if len(self._ends) < 2:
            return 0.0
        seconds = max(self._clock(), self._ends[-1]) - self._ends[0]
        return (len(self._ends) - 1) / max(seconds, 1e-3)

    def retry_after(self, sequences: int) -> int:
        """Return whole seconds, 1 to 60, until `sequences` fit within the limit at the measured
        rate."""
        rate = self.rate()
        if not rate:
            return 1
        needed = self.pending + sequences - self.most
        return max(1, min(LONGEST_WAIT, math.ceil(needed / rate)))

    def _full(self, cost: RequestCost, why: str) -> ApiError:
        return ApiError(
            429,
            f"{why}; come again later",
            code="queue_full",
            retry_after=self.retry_after(cost.sequences),
        )


class KeyQuota:
    """Hold one key to `in_flight` requests at a time and `per_minute` tokens; None for no limit. A
    minute's tokens are there at the start, and return at a steady rate."""

    def __init__(
        self,
        name: str,
        in_flight: int | None,
        per_minute: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._most, self._per_minute, self._clock = name, in_flight, per_minute, clock
        self._running = 0
        self._left, self._at = float(per_minute or 0), clock()

    @contextmanager
    def let_in(self) -> Iterator[None]:
        """Count one request inside the block. Raises ApiError 429 where the key has no more."""
        if self._most is not None and self._running >= self._most:
            raise ApiError(
                429,
                f"{self._running} requests of the key {self._name} are in flight, and "
                f"{self._most} may be; wait for one to end",
                code="key_in_flight",
                retry_after=1,
            )
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    @contextmanager
    def reserve(self, cost: RequestCost) -> Iterator[TokenReservation]:
        """Take the tokens of a request, and give back what it did not use. Raises ApiError 400 for
        more than a minute has, 429 for more than are left."""
        if self._per_minute is not None:
            self._take(cost, self._per_minute)
        reserved = TokenReservation(cost.tokens)
        try:
            yield reserved
        finally:
            if self._per_minute is not None:
                self._refill(self._per_minute, cost.tokens - reserved.used)

    def _take(self, cost: RequestCost, per_minute: int) -> None:
        if cost.tokens > per_minute:
            raise bad_request(
                f"one request may cost {cost.tokens} tokens, read and sampled, and the key "
                f"{self._name} has {per_minute} a minute; lower max_tokens or n, or with a "
                "strategy set forge.budget",
                cost.of,
                "too_costly",
            )
        self._refill(per_minute)
        if cost.tokens > self._left:
            per_second = per_minute / QUOTA_SECONDS
            raise ApiError(
                429,
                f"the key {self._name} has {per_minute} tokens a minute, {int(self._left)} "
                f"are left, and this request may cost {cost.tokens}; come again later",
                code="key_tokens",
                retry_after=max(1, math.ceil((cost.tokens - self._left) / per_second)),
            )
        self._left -= cost.tokens

    def _refill(self, per_minute: int, returned: int = 0) -> None:
        now = self._clock()
        gained = (now - self._at) * per_minute / QUOTA_SECONDS
        self._left, self._at = min(float(per_minute), self._left + gained + returned), now
