"""Whole runs of recursive self-aggregation, over samplers that follow a script."""

from __future__ import annotations

from math import comb

from rooms.strategies.rsa_setup import accuracies, majority_copier

from cartridge_forge.plugins.statistics.intervals import wilson_interval


def test_a_copier_of_the_majority_drifts_from_below_a_half_down_and_from_above_up() -> None:
    """One step by the hypergeometric formula; a leak of the right answers would lift the first."""
    n, right, questions = 16, 6, 60
    found = accuracies(majority_copier(right), questions, N=n, K=3, T=6)
    pairs = comb(right, 2) * (n - right) + comb(right, 3)
    low, high = wilson_interval(round(found[1] * questions * n), questions * n)
    assert low <= pairs / comb(n, 3) <= high
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0] / 2
    risen = accuracies(majority_copier(n - right), questions, N=n, K=3, T=6)
    assert risen == sorted(risen)
    assert risen[-1] > 1 - found[0] / 2
