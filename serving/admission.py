"""Limit how many responses wait or run, and compute Retry-After. Pure except for its clock."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serving.errors import ApiError

REMEMBERED = 64  # completion times that the rate is measured over
LONGEST_WAIT = 60  # seconds: the largest Retry-After


class Admission:
    """Admit at most `most` responses, and measure the rate of those that ended last."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self._clock = most, clock
        self.pending = 0
        self._ends: deque[float] = deque(maxlen=REMEMBERED)

    @contextmanager
    def let_in(self, responses: int) -> Iterator[None]:
        """Count `responses` as pending inside the block. Raises ApiError 400 for more than the
        limit in one request, 429 for a full queue."""
        if responses > self.most:
            raise ApiError(
                400,
                f"one request asks for {responses} responses, and {self.most} are decoded at a "
                "time; send fewer prompts, or a smaller n",
                param="n",
            )
        if self.pending + responses > self.most:
            raise ApiError(
                429,
                f"{self.pending} responses wait or run, and {self.most} may; come again later",
                code="queue_full",
                retry_after=self.retry_after(responses),
            )
        self.pending += responses
        try:
            yield
        finally:
            self.pending -= responses
            self._ends.extend([self._clock()] * responses)

    def rate(self) -> float:
        """Return the responses that ended per second, over the last 64; 0 while fewer than two
        ended."""
        if len(self._ends) < 2:
            return 0.0
        seconds = max(self._clock(), self._ends[-1]) - self._ends[0]
        return (len(self._ends) - 1) / max(seconds, 1e-3)

    def retry_after(self, responses: int) -> int:
        """Return whole seconds, 1 to 60, until `responses` fit within the limit at the measured
        rate."""
        rate = self.rate()
        if not rate:
            return 1
        needed = self.pending + responses - self.most
        return max(1, min(LONGEST_WAIT, math.ceil(needed / rate)))
