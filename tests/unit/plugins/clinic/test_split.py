"""The hold-out split: decided by a question's own words, once and for all."""

import hashlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.clinic.patients import generate_clinic
from cartridge_forge.plugins.clinic.text import PatientQuestion, is_held_out, parse_patients


def question(patient: str, text: str, number: int = 0) -> PatientQuestion:
    return PatientQuestion(f"{patient}/{number}", patient, text, ("1", "2", "3", "4", "5"), "1")


# The first 16 hex digits of `printf 'patient_01\nwhat is the sodium?' | sha256sum`, and so on.
WORKED = [
    ("patient_01", "what is the sodium?", "66df3a8b9e56d7be"),  # 0.402
    ("patient_01", "what is the ecg?", "af2facc2649a43c7"),  # 0.684
    ("patient_02", "what is the ecg?", "a6a83acb3391fd67"),  # 0.651
    ("patient_03", "what is the surgeon?", "fec646486de81506"),  # 0.995
    ("patient_20", "Welche Diagnose wurde gestellt? é", "11a56cbc8cd6a8d4"),  # 0.069, UTF-8
    ("patient_04", "what is the pulse?", "9d54ab8c9dd6c667"),  # 0.615
]


@pytest.mark.parametrize(("patient", "text", "digest"), WORKED)
def test_where_worked_questions_fall(patient: str, text: str, digest: str) -> None:
    assert hashlib.sha256(f"{patient}\n{text}".encode()).hexdigest().startswith(digest)
    place = Fraction(int(digest, 16), 2**64)
    assert is_held_out(question(patient, text), float(place) + 1e-9)
    assert not is_held_out(question(patient, text), float(place) - 1e-9)


def test_the_split_of_a_quarter_a_half_and_two_thirds() -> None:
    def held(share: float) -> list[bool]:
        return [is_held_out(question(p, t), share) for p, t, _ in WORKED]

    assert held(0.25) == [False, False, False, False, True, False]
    assert held(0.5) == [True, False, False, False, True, False]
    assert held(0.66) == [True, False, True, False, True, True]
    assert held(1.0) == [True] * 6
    assert held(0.0) == [False] * 6


def test_only_patient_and_words_decide() -> None:
    """Number, options and place in the file may change; the question stays on its side."""
    patients = parse_patients(generate_clinic(0, 4, 20, 4), "clinic")
    asked = [q for p in patients for q in p.questions]
    side = {(q.patient, q.text): is_held_out(q, 0.5) for q in asked}
    for i, q in enumerate(reversed(asked)):
        moved = PatientQuestion(f"{q.patient}/{i}", q.patient, q.text, q.options[::-1], q.correct)
        assert is_held_out(moved, 0.5) == side[q.patient, q.text]


def test_more_patients_move_nothing_across() -> None:
    few = parse_patients(generate_clinic(0, 2, 20, 4), "clinic")
    many = parse_patients(generate_clinic(0, 9, 20, 4), "clinic")
    held = {q.id for p in many for q in p.questions if is_held_out(q, 0.5)}
    for patient in few:
        for q in patient.questions:
            assert (q.id in held) == is_held_out(q, 0.5)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_the_share_is_about_what_was_asked_for(share: float) -> None:
    """2000 hashed questions: within 0.05, which is over 4 standard deviations (0.0112 at 0.5)."""
    held = [is_held_out(question("patient_01", f"question {i}?"), share) for i in range(2000)]
    assert sum(held) / 2000 == pytest.approx(share, abs=0.05)


@given(st.text(), st.text(), st.floats(0, 1), st.floats(0, 1))
def test_raising_the_share_only_adds(patient: str, text: str, a: float, b: float) -> None:
    low, high = sorted((a, b))
    asked = question(patient, text)
    assert is_held_out(asked, low) <= is_held_out(asked, high)
