"""Test risk by coverage and the part of an oracle's gain that a fallback has, by hand."""

from __future__ import annotations

import pytest

from cartridge_forge.plugins.evaluate.risk_coverage import fallback_recovery, risk_coverage


def test_risk_is_the_mean_loss_of_the_most_confident() -> None:
    curve = risk_coverage([0.9, 0.5, 0.7, 0.2], [0.0, 1.0, 1.0, 1.0])
    assert curve.coverages == (0.25, 0.5, 0.75, 1.0)
    assert curve.risks == pytest.approx((0.0, 1 / 2, 2 / 3, 3 / 4))
    assert curve.area == pytest.approx((0 + 1 / 2 + 2 / 3 + 3 / 4) / 4)


def test_answers_of_one_confidence_come_together() -> None:
    one = risk_coverage([0.9, 0.5, 0.5], [0.0, 1.0, 0.0])
    assert one == risk_coverage([0.5, 0.9, 0.5], [0.0, 0.0, 1.0])
    assert one.coverages == pytest.approx((1 / 3, 1.0))
    assert one.risks == pytest.approx((0.0, 1 / 3))
    assert one.area == pytest.approx(2 / 9)  # 0 over a third, 1/3 over two thirds
    with pytest.raises(ValueError, match="no answer"):
        risk_coverage([], [])


def test_a_fallback_is_measured_by_an_oracle_of_the_same_share() -> None:
    losses, others = [1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.5, 0.0]  # gains 1, -1, 0.5, 0
    # The oracle takes the first and the third: 1.5. By confidence the second and third: -0.5.
    assert fallback_recovery([0.9, 0.1, 0.2, 0.8], losses, others, 0.5) == pytest.approx(-1 / 3)
    assert fallback_recovery([0.1, 0.9, 0.2, 0.8], losses, others, 0.5) == 1.0
    assert fallback_recovery([0.2, 0.9, 0.1, 0.8], losses, others, 0.25) == 0.5
    assert fallback_recovery([0.1, 0.2], [0.0, 1.0], [0.0, 1.0], 0.5) is None
    with pytest.raises(ValueError, match=r"from 0 to 1: got 1\.5"):
        fallback_recovery([0.1], [1.0], [0.0], 1.5)
