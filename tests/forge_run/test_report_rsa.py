"""The report's section on populations: figures by hand."""

from __future__ import annotations

from typing import Any

import pytest

from forge_run.report_rsa import aggregation


def arm(*accuracy: float) -> dict[str, Any]:
    return {"populations": {"accuracy": list(accuracy), "majority_vote": 0.7, "pass_at_n": 0.9}}


def row(step: int, *accuracy: float) -> dict[str, Any]:
    return {"step": step, "episodes": {f"rsa/accuracy_{t}": a for t, a in enumerate(accuracy)}}


def test_arms_curves_and_the_gain_are_shown() -> None:
    gain = {"last": 0.2, "first": 0.05, "aggregation": 0.15, "share": 0.75}
    arms = {"on_policy": arm(0.5, 0.8), "untrained": arm(0.45, 0.6)}
    rows = [row(1, 0.4, 0.5), row(2, 0.45, 0.6)]
    shown = aggregation(rows, {"arms": arms, "aggregation": gain})
    assert shown.count("<svg") == 1
    assert "population 1" in shown
    assert "50.0%" in shown
    assert "80.0%" in shown
    assert shown.index("untrained") < shown.index("on_policy")
    assert (
        "Training moved the last population by +20.0 points of accuracy, and the first by +5.0: "
        "aggregation's part is +15.0 points, 75.0% of it."
    ) in shown
    lost = {"last": -0.1, "first": 0.0, "aggregation": -0.1, "share": None}
    assert "aggregation's part is -10.0 points." in aggregation([], {"aggregation": lost})


@pytest.mark.parametrize("results", [{}, {"arms": {"on_policy": {"accuracy": 0.5}}}])
def test_a_run_without_populations_has_no_section(results: dict[str, Any]) -> None:
    assert aggregation([{"step": 1, "episodes": {"count": 2}}, {"step": 2}], results) == ""
