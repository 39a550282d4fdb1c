"""Continuous batching: requests that come and go get what they would have got alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rooms.learning.decoding_setup import ASKED, alone, engine

from cartridge_forge.protocols.step import Completion

if TYPE_CHECKING:
    from twins import Twin


def same(one: Completion, other: Completion) -> None:
    assert (one.request_id, one.token_ids, one.finish_reason, one.ended_by, one.dropped) == (
        other.request_id, other.token_ids, other.finish_reason, other.ended_by, other.dropped,
    )  # fmt: skip
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.fixture
def expected(twin: Twin) -> list[Completion]:
    return [alone(twin, r) for r in ASKED]


# The fixtures are only read.
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(0, 6), min_size=len(ASKED), max_size=len(ASKED)), st.integers(1, 8))
def test_whenever_they_come_they_get_what_they_would_alone(
    twin: Twin, expected: list[Completion], steps: list[int], rows: int
) -> None:
    """Request i comes `steps[i]` steps after the one before it; at most `rows` are decoded."""
    served, done = engine(twin, max_rows=rows), {}
    for r, wait in zip(ASKED, steps, strict=True):
        for _ in range(wait):
            done |= dict(served.step())
        served.add(r.id, r, r.prefix)
    for _ in range(200):
        if len(done) == len(ASKED):
            break
        done |= dict(served.step())
    assert dict(served.step()) == {}
    for r, other in zip(ASKED, expected, strict=True):
        same(done[r.id], other)
