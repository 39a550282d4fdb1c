"""Continuous batching: requests that come and go get what they would have got alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learning.decoding.decode_batch import generate
from learning.decoding.engine import TorchEngine
from protocols.errors import DataError
from protocols.types import (
    Completion,
    GenerateRequest,
    PrefixRef,
    Sampling,
    StopCondition,
)

if TYPE_CHECKING:
    from twins import Twin

END = frozenset({5})


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(97 + i % 26) for i in ids)


def request(name: str, prefix: str, prompt: int, most: int, temperature: float = 1.0,
            **more: object) -> GenerateRequest:  # fmt: skip
    ids = tuple((7 * i + 3 * prompt) % 90 + 6 for i in range(prompt))
    sampling = Sampling(temperature, max_tokens=most)
    return GenerateRequest(name, ids, PrefixRef(f"document/{prefix}", 0), sampling, 17, **more)


def engine(twin: Twin, **more: int) -> TorchEngine:
    def document(name: str) -> torch.Tensor:
        if name not in twin.kv:
            raise DataError(f"no document {name!r}")
        return twin.kv[name]

    return TorchEngine(twin.model, document, END, decode, **more)


def alone(twin: Twin, r: GenerateRequest) -> Completion:
    return generate(twin.model, [r], lambda ref: twin.kv[ref.name[-1]], END, decode)[0]


def same(one: Completion, other: Completion) -> None:
    assert (one.request_id, one.token_ids, one.finish_reason, one.ended_by, one.dropped) == (
        other.request_id, other.token_ids, other.finish_reason, other.ended_by, other.dropped,
    )  # fmt: skip
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


ASKED = [
    request("a", "a", 5, 12),
    request("b", "b", 2, 30, 0.0),
    request("c", "a", 9, 3),
    request("d", "a", 1, 25, 0.7),
    request("e", "c", 4, 8),
    request("f", "a", 3, 20, until=StopCondition(strings=("e",))),
    request("g", "b", 6, 9, top_logprobs=3),
]


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
