"""Scoring: counts by hand, Wilson's interval by its formula."""

from math import sqrt

import pytest

from cartridge_forge.plugins.clinic.text import PatientQuestion
from cartridge_forge.plugins.documents.study.longhealth import LongHealthQuestion, measure

Z = 1.959963984540054


def exam(correct: str, *options: str) -> LongHealthQuestion:
    options = options or ("stenosis", "fracture", "cyst", "ulcer", "normal")
    question = PatientQuestion("patient_01/0", "patient_01", "which?", options, correct)
    return LongHealthQuestion(question, "what?", (4, 5), (4, 5), ("p",))


def test_right_wrong_and_unreadable() -> None:
    exams = [exam("cyst"), exam("ulcer"), exam("normal"), exam("stenosis")]
    answers = [
        "the answer is cyst.",  # right
        "answer: d",  # right, by letter
        "the answer is cyst.",  # wrong
        "normal",  # names no answer: wrong, and counted apart
    ]
    measured = measure(exams, answers)
    assert measured["accuracy"] == 0.5
    assert measured["n"] == 4
    assert measured["parse_failures"] == 1
    # k = 2 of n = 4: the middle is 0.5, half = z sqrt(2 * 2 / 4 + z^2 / 4) / (4 + z^2) = 0.34996
    half = Z * sqrt(1 + Z * Z / 4) / (4 + Z * Z)
    assert measured["ci95"] == pytest.approx([0.5 - half, 0.5 + half])
    assert measured["ci95"] == pytest.approx([0.15004, 0.84996], abs=1e-5)


def test_an_unreadable_answer_is_not_option_a() -> None:
    measured = measure([exam("stenosis")] * 3, ["", "I cannot say.", "the answer is unknown."])
    assert (measured["accuracy"], measured["parse_failures"]) == (0.0, 3)


def test_either_of_two_letters_with_the_right_text_is_right() -> None:
    twins = exam("VRd", "VCD", "VRd", "KRd", "VRd", "none of these")
    answers = ["answer: b", "answer: d", "the answer is VRd", "answer: a"]
    assert measure([twins] * 4, answers)["accuracy"] == 0.75


def test_all_right() -> None:
    measured = measure([exam("cyst")] * 10, ["answer: c"] * 10)
    # Wilson at k = n = 10: the lower end is 10 / (10 + z^2)
    assert measured == {
        "accuracy": 1.0,
        "ci95": [pytest.approx(10 / (10 + Z * Z)), 1.0],
        "n": 10,
        "parse_failures": 0,
    }


def test_an_answer_is_missing() -> None:
    with pytest.raises(ValueError, match="zip"):
        measure([exam("cyst")] * 2, ["answer: c"])
