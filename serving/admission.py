"""How many responses are let in, and when to come again. Pure but for the clock it is given."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serving.errors import ApiError

REMEMBERED = 64  # ends of responses that the rate is measured over
LONGEST_WAIT = 60  # seconds: nobody is told to stay away for longer


class Admission:
    """At most `most` responses wait or run. The rate is that of the last ones that ended."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self._clock = most, clock
        self.pending = 0
        self._ends: deque[float] = deque(maxlen=REMEMBERED)

    @contextmanager
    def let_in(self, responses: int) -> Iterator[None]:
        """Raises ApiError 429 where there is no room."""
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
        """Responses that end a second, measured over the last ones; 0 where too few are known."""
        if len(self._ends) < 2:
            return 0.0
        seconds = max(self._clock(), self._ends[-1]) - self._ends[0]
        return (len(self._ends) - 1) / max(seconds, 1e-3)

    def retry_after(self, responses: int) -> int:
        """Whole seconds until so many may be let in, at the measured rate."""
        rate = self.rate()
        if not rate:
            return 1
        needed = self.pending + responses - self.most
        return max(1, min(LONGEST_WAIT, math.ceil(needed / rate)))
