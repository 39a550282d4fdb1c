"""Gold answers: the share of the gap that an arm closes, worked by hand."""

from typing import Any

import pytest

from cartridge_forge.plugins.statistics.gold import gold_results, side_by_side


def row(arm: str, id: str, nll: float | None, document: str = "a", **more: Any) -> Any:
    return {
        "arm": arm, "step": 0, "sampled": False, "id": id, "fact": f"what is {id}?",
        "document": document, "document_hash": "d", "question_hash": id, "text": f"{arm} says",
        "answer": None, "expected": f"it is {id}", "right": 0.0, "nll": nll, "reward": None,
        "tokens": 1, **more,
    }  # fmt: skip


def test_the_share_closed_is_that_of_the_means() -> None:
    """none 4 and 2, cartridge 2 and 2, document 1 and 1: (3 - 2) / (3 - 1)."""
    rows = [
        row("none", "x", 4.0), row("none", "y", 2.0), row("document", "x", 1.0),
        row("document", "y", 1.0), row("on_policy", "x", 2.0), row("on_policy", "y", 2.0),
        row("on_policy", "z", 9.0),  # which no other arm answered
        row("on_policy", "x", 8.0, sampled=True), row("none", "held out", 1.0, right=None),
    ]  # fmt: skip
    found = gold_results(rows)
    assert found is not None
    assert (found["n"], found["documents"]) == (2, 1)
    arms = found["arms"]
    assert list(arms) == ["none", "document", "on_policy"]
    assert [arms[a]["nll"] for a in arms] == [3.0, 1.0, 2.0]
    assert [arms[a]["closed"] for a in arms] == [0.0, 1.0, 0.5]
    # Resamples of two facts: xx gives 2/3, yy 0, xy 1/2.
    assert arms["on_policy"]["ci95"] == [0.0, pytest.approx(2 / 3)]
    assert arms["document"]["ci95"] == [1.0, 1.0]


def test_without_a_gap_or_a_baseline_there_is_no_share() -> None:
    flat = [row("none", "x", 1.0), row("document", "x", 1.0), row("on_policy", "x", 1.0)]
    found = gold_results(flat)
    assert found is not None
    assert found["arms"]["on_policy"] == {"nll": 1.0, "closed": None, "ci95": None}
    found = gold_results(flat[2:])
    assert found is not None
    assert found["arms"] == {"on_policy": {"nll": 1.0, "closed": None, "ci95": None}}
    assert gold_results([row("none", "x", None)]) is None


def test_answers_stand_side_by_side() -> None:
    arms, shown = side_by_side([row("on_policy", "x", 2.0), row("none", "x", 4.0)])
    assert arms == ["none", "on_policy"]
    assert shown == [
        ("what is x?", "it is x", {"none": "none says", "on_policy": "on_policy says"})
    ]
