"""Answers are compared as SQuAD does, beyond ASCII too."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.data.metrics.squad_metrics import compute_f1, normalize_answer

from cartridge_forge.plugins.strategies.answers.squad import (
    exact_match,
    f1,
    normalised,
    squad_scores,
)


def test_normalisation_by_hand() -> None:
    assert normalised("The  Nine, days!") == "nine days"
    assert f1("nine days", "nine days in June") == pytest.approx(2 * 2 / (2 + 4))
    assert f1("nine nine", "nine") == pytest.approx(2 * 1 / 3)
    assert f1("", "nine") == 0.0
    assert squad_scores("about nine dry days", ("9", "nine days")) == (0.0, pytest.approx(4 / 6))


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("Dr Okafor", "\u201cDr Okafor\u201d"),
        ("Dr Okafor", "\u00abDr Okafor\u00bb"),
        ("Dr Okafor", "Dr\u00a0Okafor"),
        ("St. John's", "St. John\u2019s"),
        ("St. John's", "St. John\u02bcs"),
        ("1990-1995", "1990\u20131995"),
        ("1990-1995", "1990\u22121995"),
        ("1990-1995", "1990\u20111995"),
        ("Yes", "Yes\u2026"),
        ("caf\u00e9", "cafe\u0301"),
        ("5 km", "\uff15 \uff4b\uff4d"),
        ("\u65e5\u672c", "\u300c\u65e5\u672c\u300d\u3002"),
        ("stra\u00dfe", "STRASSE"),
        ("zero", "ze\u00adro\u200b"),
        ("90\u00b0", "90"),
        ("\u20ac20", "20 \u20ac"),
    ],
)
def test_signs_of_unicode(answer: str, response: str) -> None:
    assert squad_scores(response, (answer,)) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("answer", "response", "exact", "score"),
    [
        ("A", "A", 1.0, 1.0),
        ("A", "a.", 1.0, 1.0),
        ("A", "\u201cA\u201d", 1.0, 1.0),
        ("A", "The blood group is A.", 0.0, 2 * 1 / (5 + 1)),
        ("A", "B", 0.0, 0.0),
        ("A", "A+", 0.0, 0.0),
        ("A+", "A-", 0.0, 0.0),
        ("A-", "A\u2212", 1.0, 1.0),
        ("+", "+", 1.0, 1.0),
        ("+", "-", 0.0, 0.0),
        ("-", "\u2013", 1.0, 1.0),
        ("+", "rhesus +", 0.0, 2 * 1 / (2 + 1)),
        ("The", "the", 1.0, 1.0),
        ("A", "", 0.0, 0.0),
        ("+", "The chart does not say.", 0.0, 0.0),
        ("A", "There is no information about a blood group.", 0.0, 0.0),
        ("A", "N/A", 0.0, 0.0),
    ],
)
def test_answers_of_which_normalisation_leaves_nothing(
    answer: str, response: str, exact: float, score: float
) -> None:
    assert exact_match(response, answer) == exact
    assert f1(response, answer) == pytest.approx(score)


ASCII = st.text(st.characters(max_codepoint=126, min_codepoint=32), max_size=40)


@given(a=ASCII, b=ASCII)
def test_ascii_is_scored_as_by_squads_own_script(a: str, b: str) -> None:
    assert normalised(a) == normalize_answer(a)
    if normalised(b):
        assert f1(a, b) == pytest.approx(compute_f1(b, a))
