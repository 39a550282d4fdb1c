"""Tell the time of records whose differences are durations."""

from __future__ import annotations

import time

_OFFSET = time.time() - time.monotonic()


def steady_time() -> float:
    """Return seconds since the epoch that only grow: the host's clock as it was when this process
    began, plus monotonic seconds. A clock that is set later changes no difference of two calls."""
    return _OFFSET + time.monotonic()
