"""Which responses decline to answer.

tests/data/declines has a line for each response, `+` where it declines: tuning.txt was written and
seen while the rule was made, test.txt afterwards, and the rule was not changed for it.
"""

from pathlib import Path

import pytest

from cartridge_forge.plugins.strategies.answers.declines import declines

FILES = Path("tests/data/declines")


def read(name: str) -> list[tuple[bool, str, str]]:
    """Return (declines, question, response) of each line."""
    found = []
    for line in (FILES / name).read_text().splitlines():
        question, response = line[2:].split(" | ", 1)
        found.append((line[0] == "+", question, response))
    return found


def test_at_least_57_of_the_60_apart_from_tuning() -> None:
    lines = read("test.txt")
    assert [sum(want for want, _, _ in lines), len(lines)] == [30, 60]
    assert not set(lines) & set(read("tuning.txt"))
    right = [declines(response, question) == want for want, question, response in lines]
    assert sum(right) >= 57


@pytest.mark.parametrize(("want", "question", "response"), read("tuning.txt"))
def test_responses_of_tuning(want: bool, question: str, response: str) -> None:
    assert declines(response, question) is want


@pytest.mark.parametrize(
    ("response", "want"),
    [
        ("", True),
        (" … ", True),
        ("—", True),
        ("+", False),
        ("A", False),
        ("It doesn\u2019t say.", True),
        ("IT DOES NOT SAY", True),
        ("It doesn\u02bct say", True),
        ("**Not stated**", True),
        ("\u201cUnknown\u201d", True),
        ("Unknown\u2014the text doesn\u2019t say", True),
        ("It doesn't say: 42", False),
    ],
)
def test_signs(response: str, want: bool) -> None:
    assert declines(response) is want


def test_a_question_of_yes_or_no_is_answered_by_a_negation() -> None:
    asked = "Is parking included?"
    for response in (
        "No",
        "No.",
        "It is not included.",
        "No, it isn't.",
        "Parking isn't included.",
    ):
        assert not declines(response, asked), response
    for response in ("It isn't mentioned.", "The text does not say whether parking is included."):
        assert declines(response, asked), response


def test_a_long_response_is_read_in_time() -> None:
    # Patterns over a clause of thousands of words would take minutes.
    assert not declines("the text does not say no information is given in it " * 400)
