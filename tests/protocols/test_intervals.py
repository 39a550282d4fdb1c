"""Wilson's interval against values worked by hand with z = 1.96, z^2 = 3.8416."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.intervals import wilson_interval


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


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_it_holds_the_share_and_mirrors(counts: tuple[int, int]) -> None:
    k, n = counts
    lo, hi = wilson_interval(k, n)
    assert 0 <= lo <= k / n <= hi <= 1
    assert wilson_interval(n - k, n) == pytest.approx((1 - hi, 1 - lo), abs=1e-12)
