"""Questions of several fields: their words, and the scores of answers, worked out by hand."""

from __future__ import annotations

import pytest

from cartridge_forge.plugins.clinic.findings import (
    FindingsQuestion,
    all_right,
    answer_parts,
    draw_findings,
    parts_f1,
    said_parts,
    says_parts,
)
from cartridge_forge.plugins.clinic.patients import generate_clinic
from cartridge_forge.plugins.clinic.text import parse_patients
from cartridge_forge.protocols.errors import DataError

RIGHT = {"sodium": "41 mmol", "surgeon": "weber", "ecg": "normal", "mri": "cyst"}
(PATIENT,) = parse_patients(generate_clinic(3, 1, 8, 2), "the test")


def test_a_question_asks_for_its_fields_in_order() -> None:
    question = FindingsQuestion("q", ("p",), RIGHT)
    assert question.text == (
        "what is the sodium? what is the surgeon? what is the ecg? what is the mri?"
    )
    assert question.correct == "sodium 41 mmol, surgeon weber, ecg normal, mri cyst"
    assert says_parts(RIGHT) == f"the answer is {question.correct}."
    assert said_parts(says_parts(RIGHT)) == RIGHT


@pytest.mark.parametrize(
    ("response", "right", "f1"),
    [
        ("the answer is sodium 41 mmol, surgeon weber, ecg normal, mri cyst.", True, 1.0),
        ("The answer is mri cyst, ECG  Normal, surgeon weber, sodium 41 mmol", True, 1.0),
        ("the answer is sodium 41 mmol, surgeon weber, ecg normal, mri edema.", False, 0.75),
        # Two right of two: precision 1, recall 1/2. Then two of three: 2 * 2 / (4 + 3).
        ("the answer is surgeon weber, mri cyst.", False, 2 / 3),
        ("the answer is surgeon weber, mri cyst, ecg edema.", False, 4 / 7),
        # All four, and a part that is not asked for: 2 * 4 / (4 + 5).
        ("the answer is sodium 41 mmol, surgeon weber, ecg normal, mri cyst, pulse 9 beats.", True,
         8 / 9),
        # The first of two values counts, and a value is its whole text.
        ("the answer is sodium 4 mmol, sodium 41 mmol.", False, 0.0),
        ("the answer is sodium 41.", False, 0.0),
        ("sodium 41 mmol", False, 0.0),
        ("the answer is", False, 0.0),
    ],
)  # fmt: skip
def test_scores_by_hand(response: str, right: bool, f1: float) -> None:
    said = said_parts(response)
    assert all_right(RIGHT, said) is right
    assert parts_f1(RIGHT, said) == pytest.approx(f1)


def test_parts_are_named_by_their_first_word() -> None:
    assert answer_parts("Sodium 41  mmol , ecg normal,, lone, ecg edema") == {
        "sodium": "41 mmol", "ecg": "normal",
    }  # fmt: skip


def test_questions_are_distinct_and_of_the_chart() -> None:
    """Eight fields have 56 triples: all can be drawn, and no more."""
    facts = {q.text[len("what is the ") : -1]: q.correct for q in PATIENT.questions}
    drawn = draw_findings((PATIENT,), 3, 56, seed=1)
    assert len({frozenset(q.parts) for q in drawn}) == 56
    assert all(facts[field] == value for q in drawn for field, value in q.parts.items())
    assert drawn[:5] == draw_findings((PATIENT,), 3, 5, seed=1)
    assert drawn[:5] != draw_findings((PATIENT,), 3, 5, seed=2)
    assert [q.id for q in drawn[:2]] == ["patient_01/findings/0", "patient_01/findings/1"]
    with pytest.raises(DataError, match=r"57 questions of 3 fields .* patient_01 have 8"):
        draw_findings((PATIENT,), 3, 57, seed=1)


def test_a_question_of_two_charts_has_as_many_fields_that_only_the_one_has() -> None:
    pair = parse_patients(generate_clinic(3, 2, 16, 2), "the test")
    facts = [{q.text[len("what is the ") : -1]: q.correct for q in p.questions} for p in pair]
    shared = facts[0].keys() & facts[1].keys()
    assert shared, "the charts are such that the rule matters"
    drawn = draw_findings(pair, 4, 40, seed=1)
    assert len({frozenset(q.parts) for q in drawn}) == 40
    for question in drawn:
        assert not question.parts.keys() & shared
        own = [{f: v for f, v in question.parts.items() if f in chart} for chart in facts]
        assert [len(parts) for parts in own] == [2, 2]
        assert all(facts[i][f] == v for i in range(2) for f, v in own[i].items())
    assert drawn[0].patients == ("patient_01", "patient_02")
    assert drawn[0].id == "patient_01+patient_02/findings/0"
    # The charts' fields are mixed: which chart has the first of a question varies.
    assert len({next(iter(q.parts)) in facts[0] for q in drawn}) == 2
    own_each = 16 - len(shared)
    pairs = (own_each * (own_each - 1) // 2) ** 2
    assert len(draw_findings(pair, 4, pairs, seed=1)) == pairs
    with pytest.raises(DataError, match=rf"{pairs + 1} questions of 2 fields of each chart"):
        draw_findings(pair, 4, pairs + 1, seed=1)
