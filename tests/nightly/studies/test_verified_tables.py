"""The tables of the study of verified text, against values worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from studies.verified import tables


def record(monkeypatch: pytest.MonkeyPatch, outcomes: dict[str, list[float]]) -> None:
    rows: list[dict[str, Any]] = [
        {
            "chart": 600 + i, "arm": arm, "rate": 0.4, "sampled": value, "greedy": 1.0,
            "nats": 0.5, "tokens": 100, "sampling_cpu_s": 0.5,
        }
        for arm, values in outcomes.items()
        for i, value in enumerate(values)
    ]  # fmt: skip
    monkeypatch.setattr(tables, "document", lambda study, name: {"rows": rows})


def test_the_charts_of_b_follow_from_the_spread() -> None:
    # (2.93 * 0.08 / 0.03)^2 = 61.05, and the next multiple of 16 is 64.
    assert [tables.charts_needed(s) for s in (0.02, 0.0573, 0.08, 0.1, 0.3)] == [32, 32, 64, 96, 96]


def test_arms_are_compared_on_the_charts_of_the_smaller_study(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The differences of A are 0.1, 0.2 and 0.3: a mean of 20 points, and t(2) 4.303 * 10 / sqrt(3).
    record(
        monkeypatch,
        {
            "plain, forward": [0.1, 0.1, 0.1], "verified, forward": [0.2, 0.3, 0.4],
            "offline, forward": [0.5, 0.5], "offline, JSD": [0.6, 0.5, 0.9],
        },
    )  # fmt: skip
    _, (a, c) = tables.primary("verified", "charts")
    assert a[:5] == ["A", "verified, forward over plain, forward", "3", "+20.0", "-4.8 to +44.8"]
    assert c[:4] == ["C", "offline, JSD over offline, forward", "2", "+5.0"]


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.01, -0.01] * 16, "equal within 3 points"),
        ([0.09, 0.11] * 16, "verified is better"),
        ([-0.09, -0.11] * 16, "offline is better"),
        ([0.3, -0.3] * 16, "open"),
    ],
)
def test_b_is_decided_by_both_intervals(
    monkeypatch: pytest.MonkeyPatch, differences: list[float], verdict: str
) -> None:
    theirs = [0.5] * 32
    record(
        monkeypatch,
        {
            "offline, JSD": theirs,
            "verified, JSD": [a + b for a, b in zip(theirs, differences, strict=True)],
        },
    )
    _, (row,) = tables.equal("verified", "charts")
    assert row[-1] == verdict
    if verdict == "equal within 3 points":
        # s = 0.01 * sqrt(32 / 31), t(31) at 95% one-sided = 1.6955: 1.6955 * s / sqrt(32) = 0.30.
        assert row[5] == "-0.3 to +0.3"
