"""Differences of times are durations, whatever the host's clock does."""

from __future__ import annotations

import time

import pytest

from protocols.clock import steady_time


def test_a_clock_that_is_set_back_ends_no_span_before_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, passed = steady_time(), time.monotonic()
    assert abs(before - time.time()) < 3600, "seconds since the epoch"
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: passed + 2.5)
    assert steady_time() - before == pytest.approx(2.5, abs=0.5)
