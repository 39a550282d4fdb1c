"""The tables of the study "on policy", from records of two documents made by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rooms.kept_runs import HandmadeArchive

from studies import archive
from studies.handbook.study import lines_of, shares_of
from studies.tables.recorded import document_arms, document_comparisons, document_outcomes
from studies.verified import tables

ARMS = {
    "document": "document", "untrained": "cold", "offline": "cold, offline",
    "on_policy": "cold, on policy",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the cold runs with forward KL. On policy 3 and 4 of 4 are right, offline 2 and 2; their
    passages have perplexity e and e**2 on policy, e**0.5 and e**0.5 offline."""
    monkeypatch.setattr(archive, "HOME", tmp_path)
    document_outcomes.cache_clear()
    study = HandmadeArchive("on_policy")
    right = {300: {"on_policy": 3, "offline": 2}, 301: {"on_policy": 4, "offline": 2}}
    nats = {300: {"on_policy": 1.0, "offline": 0.5}, 301: {"on_policy": 2.0, "offline": 0.5}}
    for seed, counts in right.items():
        answers = [
            {"arm": arm, "sampled": sampled, "right": float(i < counts.get(arm, 0))}
            for arm in ARMS
            for sampled in (False, True)
            for i in range(4)
        ]
        kinds = {"on_policy": "hybrid"} if seed == 301 else {}  # as after a warm start
        measured = [
            {"kind": kinds.get(arm, arm), "passages": {"value": math.exp(value), "tokens": 100}}
            for arm, value in nats[seed].items()
        ]
        study.add(
            "sweep", seed, ARMS, {"answers": answers}, eval={"rows": measured},
            spec={"learn": {"loss": {"direction": "forward"}}},
        )  # fmt: skip
    study.pack()
    yield
    document_outcomes.cache_clear()


def test_arms_have_both_outcomes_by_document() -> None:
    """75% and 100%: 87.5 -+ 158.8, cut to 0 to 100. Nats 1 and 2: 1.5 -+ 12.706 * 0.5."""
    _, body = document_arms("on_policy", "sweep")
    rows = {row[0]: row[1:] for row in body}
    assert list(rows) == ["document", "cold", "cold, offline", "cold, on policy"]
    assert rows["cold, on policy"] == [
        "forward", "2", "87.5", "0.0 to 100.0", "1.50", "-4.85 to 7.85",
    ]  # fmt: skip
    assert rows["cold, offline"] == ["forward", "2", "50.0", "50.0 to 50.0", "0.50", "0.50 to 0.50"]
    assert rows["cold"][-2:] == ["", ""]


def test_the_claim_is_decided_over_documents() -> None:
    """Differences 25 and 50 points: t is 37.5 / 12.5 = 3 at one degree of freedom, so p is
    1 - 2 atan(3) / pi = 0.205; 0.5 and 1.5 nats: t is 2 and p 0.295. By Holm the first doubles and
    the second is at least that."""
    _, body = document_comparisons("on_policy", "sweep", "primary")
    arms = ["cold, on policy over cold, offline", "forward"]
    assert body == [
        [*arms, "right, points", "2", "+37.5", "-121.3 to +196.3", "0.410"],
        [*arms, "nats a token", "2", "+1.00", "-5.35 to +7.35", "0.410"],
    ]
    _, others = document_comparisons("on_policy", "sweep", "secondary")
    assert len(others) == 12
    assert all(row[3:] == ["0", "", "", "1.000"] for row in others)


def test_arms_are_told_by_their_names_in_the_sweep() -> None:
    cell = {"obeyed": 0.5, "ci95": [0.2, 0.8], "n": 12}
    arms = {"on_policy": {"rules": {"all": {"1": cell}}}, "none": {"rules": {}}}
    assert shares_of(arms, {"on_policy": "verified"}) == {"verified": {"all": {"1": 0.5}}}


def test_differences_are_paired_by_handbook() -> None:
    def unit(
        verified: float, plain: float, offline: float
    ) -> dict[str, dict[str, dict[str, float]]]:
        shares = {"offline": offline, "plain on policy": plain, "verified": verified}
        return {
            arm: {rule: {"12": share, "1": share} for rule in ("all", "department")}
            for arm, share in shares.items()
        }

    lines = lines_of([unit(0.9, 0.5, 0.5), unit(0.7, 0.5, 0.4), unit(0.8, 0.5, 0.6)])
    assert [line[:2] for line in lines] == [
        ["all", "1"], ["all", "12"], ["department", "1"], ["department", "12"],
    ]  # fmt: skip
    # Gains over offline: 0.4, 0.3, 0.2; mean 0.3, deviation 0.1, t 4.303 at 2 degrees.
    half = 4.303 * 0.1 / 3**0.5
    assert lines[0][2:5] == ["0.500", "0.500", "0.800"]
    assert lines[0][5] == f"+0.300 (+{0.3 - half:.3f} to +{0.3 + half:.3f})"
    assert lines[0][6].startswith("+0.000")
    assert float(lines[0][7].partition(" ")[0]) == pytest.approx(0.3)


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
