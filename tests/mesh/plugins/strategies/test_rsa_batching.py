"""The benchmark of RSA's calls, run small: the same work in T calls, and in less time."""

from __future__ import annotations

from benchmarks.rsa_batching import measure


def test_a_population_is_one_call_and_faster_than_its_responses_in_turn() -> None:
    measured = measure(repeats=3, M=1, N=16, K=4, T=4)
    assert (measured["batched_calls"], measured["sequential_calls"]) == (4, 64)
    assert measured["ratio"] > 1.5  # 4.0 to 4.8 on a quiet machine
