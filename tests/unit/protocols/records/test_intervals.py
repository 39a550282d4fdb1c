"""Wilson's interval against values worked by hand with z = 1.96, z^2 = 3.8416; Student's against
closed forms, the printed table and its density, integrated."""

import random
from collections import Counter
from itertools import product
from math import gamma, pi, sqrt, tan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.records.intervals import (
    Z95,
    mean_interval,
    paired_difference,
    resampled_means,
    resamples,
    student_t95,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "n", "lo", "hi"),
    [
        # k = 0: (0, z^2 / (n + z^2)) = 3.8416 / 13.8416
        (0, 10, 0.0, 0.27754),
        # k = n mirrors it
        (10, 10, 0.72246, 1.0),
        # the middle: 0.5 -+ z sqrt(2.5 + z^2/4) / (n + z^2) = 0.5 -+ 1.96 * 1.86022 / 13.8416
        (5, 10, 0.23659, 0.76341),
        # (1 + z^2/2) / 5.8416... of two: 0.5 -+ 1.96 * sqrt(0.5 + 0.9604) / 5.8416
        (1, 2, 0.09453, 0.90547),
        # 90% of 200: (180 + 1.9208) / 203.8416 -+ 1.96 * sqrt(18 + 0.9604) / 203.8416
        (180, 200, 0.85059, 0.93433),
    ],
)
def test_hand_worked_values(successes: int, n: int, lo: float, hi: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((lo, hi), abs=2e-5)


def test_the_ends_are_exact() -> None:
    assert wilson_interval(0, 7)[0] == 0.0
    assert wilson_interval(7, 7)[1] == 1.0


def test_nothing_measured_is_nothing_known() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("successes", "n"), [(-1, 3), (4, 3), (0, -1)])
def test_impossible_counts_are_refused(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match=rf"successes must lie in 0\.\.n: got {successes} of n"):
        wilson_interval(successes, n)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_it_holds_the_share_and_mirrors(counts: tuple[int, int]) -> None:
    k, n = counts
    lo, hi = wilson_interval(k, n)
    assert 0 <= lo <= k / n <= hi <= 1
    assert wilson_interval(n - k, n) == pytest.approx((1 - hi, 1 - lo), abs=1e-12)


@pytest.mark.parametrize(
    ("values", "lo", "hi"),
    [
        # two: one degree of freedom, 1 -+ 12.706 * sqrt(2) / sqrt(2)
        ([0.0, 2.0], -11.7062, 13.7062),
        # three: 2 -+ 4.3027 * 1 / sqrt(3)
        ([1.0, 2.0, 3.0], -0.48414, 4.48414),
        # five, deviation sqrt(2.5): 3 -+ 2.7764 * sqrt(0.5)
        ([5.0, 1.0, 4.0, 2.0, 3.0], 1.03676, 4.96324),
        ([0.7, 0.7, 0.7], 0.7, 0.7),
    ],
)
def test_a_mean_over_a_few_values(values: list[float], lo: float, hi: float) -> None:
    assert mean_interval(values) == pytest.approx((lo, hi), abs=1e-4)


def test_one_value_has_no_interval_and_none_has_no_mean() -> None:
    assert mean_interval([0.5]) is None
    with pytest.raises(ValueError, match="a mean needs a value: got none"):
        mean_interval([])


def test_students_quantiles_of_one_and_two_degrees_have_closed_forms() -> None:
    assert student_t95(1) == pytest.approx(tan(0.95 * pi / 2), rel=1e-12)
    assert student_t95(2) == pytest.approx(0.95 * sqrt(2 / (1 - 0.95**2)), rel=1e-12)


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (10, 2.228),
     (19, 2.093), (30, 2.042), (60, 2.000), (120, 1.980)],
)  # fmt: skip
def test_students_quantiles_as_every_table_prints_them(freedom: int, t: float) -> None:
    assert student_t95(freedom) == pytest.approx(t, abs=5.1e-4)


@settings(max_examples=25, deadline=None)
@given(st.integers(3, 200))
def test_the_density_between_the_quantiles_integrates_to_95_percent(freedom: int) -> None:
    t, n = student_t95(freedom), 2000
    scale = gamma((freedom + 1) / 2) / (sqrt(freedom * pi) * gamma(freedom / 2))
    heights = [
        scale * (1 + (t * i / n) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(n + 1)
    ]
    simpson = heights[0] + heights[-1] + 4 * sum(heights[1::2]) + 2 * sum(heights[2:-1:2])
    assert 2 * simpson * t / n / 3 == pytest.approx(0.95, abs=1e-9)
    assert Z95 < student_t95(freedom + 1) < t


def test_no_freedom_is_refused() -> None:
    with pytest.raises(ValueError, match="freedom must be >= 1: got 0"):
        student_t95(0)


def all_resamples(n: int) -> list[list[int]]:
    return [list(sample) for sample in product(range(n), repeat=n)]


def test_a_paired_difference_over_all_resamples() -> None:
    a, b = [0.0, 0.0, 1.0], [1.0, 0.0, 1.0]  # b - a = 1, 0, 0
    every = all_resamples(3)
    found = paired_difference(a, b, resampled_means(a, every), resampled_means(b, every))
    # Of 27 resamples 8 hold the first question never, 12 once, 6 twice and 1 three times.
    assert found.mean == pytest.approx(1 / 3)
    # The 2.5% and 97.5% quantiles of 27 values are the first and the last.
    assert found.ci95 == pytest.approx((0.0, 1.0))
    assert found.share == pytest.approx(2 * 8 / 27)


def test_resamples_tend_to_all_resamples() -> None:
    rng = random.Random("test/bootstrap")
    a = [float(rng.random() < 0.4) for _ in range(5)]
    b = [float(rng.random() < 0.7) for _ in range(5)]
    every, some = all_resamples(5), resamples(["one"] * 5, 20_000, 0)
    exact = paired_difference(a, b, resampled_means(a, every), resampled_means(b, every))
    drawn = paired_difference(a, b, resampled_means(a, some), resampled_means(b, some))
    assert drawn.mean == exact.mean
    assert drawn.ci95 == pytest.approx(exact.ci95, abs=1e-9)
    assert drawn.share == pytest.approx(exact.share, abs=0.02)


def test_equal_arms_do_not_differ_and_pairs_have_a_direction() -> None:
    some = resamples(["one"] * 4, 500, 3)
    a, b = [0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]
    means_a, means_b = resampled_means(a, some), resampled_means(b, some)
    same = paired_difference(a, a, means_a, means_a)
    assert (same.mean, same.ci95, same.share) == (0.0, (0.0, 0.0), 1.0)
    there = paired_difference(a, b, means_a, means_b)
    back = paired_difference(b, a, means_b, means_a)
    assert (there.mean, back.mean, there.share) == (0.5, -0.5, back.share)
    assert there.ci95[0] >= 0


def test_whole_documents_are_drawn_where_there_are_several() -> None:
    groups = ["p", "q", "p", "r", "q", "p"]
    seen = Counter()
    for sample in resamples(groups, 300, 1):
        times = Counter(sample)
        for name, members in {"p": (0, 2, 5), "q": (1, 4), "r": (3,)}.items():
            assert len({times[i] for i in members}) == 1
            seen[name] += times[members[0]]
    assert sum(seen.values()) == 300 * 3
    assert all(abs(n - 300) < 100 for n in seen.values())
    assert resamples(groups, 5, 1) == resamples(groups, 300, 1)[:5] != resamples(groups, 5, 2)
    with pytest.raises(ValueError, match="needs a question"):
        resamples([], 5, 1)
