"""The table of the study of handbooks, from shares that are made up."""

from __future__ import annotations

import pytest

from studies.handbook.study import lines_of, shares_of


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
