"""How many kept scores differ from SQuAD's own script."""

from typing import Any

from studies.accuracy.rescored import rescore


def row(answer: str | None, expected: str | None, right: float | None = 1.0) -> dict[str, Any]:
    return {"answer": answer, "expected": expected, "right": right}


def test_scores_that_differ_are_counted() -> None:
    rows = [
        row("1990\u20131995", "1990-1995"),  # exact and F1
        row("in 1990\u20131995", "1990-1995"),  # F1
        row("nine days", "nine"),
        row(None, "nine"),
        row("nine", None),
        row("nine", "nine", None),
    ]
    assert rescore(rows) == {"answers": 3, "exact": 1, "f1": 2}
