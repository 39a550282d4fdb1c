"""Arms over the shipped reader in this process: what must be equal is, and perplexity is that of
the model alone."""

from __future__ import annotations

import pytest

from cartridge_forge.plugins.evaluate.arms import ArmAnswers


def test_the_teacher_agrees_with_itself_and_no_prefix_forgets_nothing(
    sat: dict[str, ArmAnswers],
) -> None:
    teacher = sat["document"].row["teacher"]
    assert (teacher["kl"], teacher["top1"]) == (pytest.approx(0.0, abs=1e-5), 1.0)
    bare = sat["none"].row["forgetting"]
    assert bare is not None
    assert (bare["kl"], bare["top1"]) == (pytest.approx(0.0, abs=1e-5), 1.0)
    assert bare["perplexity_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert bare["accuracy"] == bare["accuracy_without"]
    assert sat["none"].row["compression"] is None
    assert sat["on_policy"].row["teacher"]["kl"] > 0.01
