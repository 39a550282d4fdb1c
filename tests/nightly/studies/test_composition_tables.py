"""The study of compositions: its orders of cartridges, and its tables against values by hand."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from studies.accuracy import composition, composition_tables


def record(of_arm: dict[str, list[dict[str, str]]]) -> str:
    """A record of one set: by arm a row a question, two questions a chart."""
    rows: list[dict[str, object]] = []
    for arm, questions in of_arm.items():
        rows.append({"set": 1, "arm": arm, "tokens": 1000 + len(rows)})
        rows += [
            {"set": 1, "arm": arm, "chart": f"patient_{i // 2}", "question": f"q{i}", **signs}
            for i, signs in enumerate(questions)
        ]
    return json.dumps({"rows": rows})


def signs(alone: str, first: str, last: str) -> dict[str, str]:
    return {"alone": alone, "first": first, "last": last, "four": "1", "eight": "0"}


def test_a_question_is_asked_alone_beside_two_and_among_four_and_eight() -> None:
    names = [f"patient_{i:02}" for i in range(1, 9)]
    beside: Counter[str] = Counter()
    for turn in range(7):
        found = list(composition.orders("patient_03", names, turn, f"q{turn}"))
        assert [c for c, _ in found] == [
            "alone", "first", "last", "first", "last", "four", "eight",
        ]  # fmt: skip
        assert all("patient_03" in order for _, order in found)
        assert [len({*order}) for _, order in found] == [1, 2, 2, 2, 2, 4, 8]
        for (_, ahead), (_, behind) in zip(found[1:5:2], found[2:5:2], strict=True):
            assert (ahead[0], behind[::-1]) == ("patient_03", ahead)
            beside[ahead[1]] += 1
    assert beside == dict.fromkeys([n for n in names if n != "patient_03"], 2)


def test_units_are_charts_and_the_loss_is_over_both_orders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the charts trained alone the first loses 1 - 0.5, the second 0.5 - 0.25."""
    plain = [
        signs("1", "10", "10"), signs("1", "01", "01"),
        signs("1", "11", "00"), signs("0", "00", "00"),
    ]  # fmt: skip
    others = [
        signs("1", "11", "11"), signs("1", "11", "11"),
        signs("1", "11", "00"), signs("0", "11", "00"),
    ]  # fmt: skip
    text = record({"alone": plain, "beside others": others})
    monkeypatch.setattr("studies.accuracy.composition_tables.document", lambda *_: json.loads(text))
    heads, body = composition_tables.arms("accuracy", "composition")
    assert heads[-2:] == ["beside another less alone, points", "trained tokens a set"]
    assert [row[:2] + row[3:7] + row[8:] for row in body] == [
        ["alone", "2", "50.0%", "25.0%", "100.0%", "0.0%", "1,000"],
        ["beside others", "2", "100.0%", "50.0%", "100.0%", "0.0%", "1,005"],
    ]
    assert [row[7].partition(" ")[0] for row in body] == ["-37.5", "+0.0"]
    _, decided = composition_tables.decision("accuracy", "composition")
    assert [row[1] for row in decided] == ["+0.0", "+37.5", "+0.0"]
    assert [row[3] for row in decided] == ["reached", "open", "no lower"]
