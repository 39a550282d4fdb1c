"""Built-in checks against answers judged by hand."""

from __future__ import annotations

from typing import Any

import pytest

from cartridge_forge.plugins.environments.action_parsing import DESK, JSON
from cartridge_forge.plugins.episodes.handbooks.checks import GovernedTurn, obeys
from cartridge_forge.plugins.episodes.handbooks.file import CheckSpec

FIND = '{"tool": "find", "arguments": {"field": "sodium", "page": 2}}'
ANSWER = '{"tool": "answer", "arguments": {"value": "41"}}'


def check(**given: Any) -> CheckSpec:
    return CheckSpec.model_validate(given)


@pytest.mark.parametrize(
    ("given", "texts", "obeyed"),
    [
        ({"ends_with": "Bye."}, ["Yes. Bye.", " No.\nBye. \n"], True),
        ({"ends_with": "Bye."}, ["Yes. Bye.", "No. bye."], False),
        ({"ends_with": "Bye."}, ["<think>so: Bye.</think> Yes."], False),
        ({"begins_with": "feat"}, ["feat: a"], True),
        ({"begins_with": "feat"}, ["a feat"], False),
        ({"contains": "A-12"}, ["see A-12 there", "A-12"], True),
        ({"contains": "A-12"}, ["see A-12", "see a-12"], False),
        ({"lacks": "sorry"}, ["Yes.", "Sorry."], True),
        ({"lacks": "sorry"}, ["Yes.", "I am sorry."], False),
        ({"matches": r"\A[a-z]+(\([a-z]+\))?: \S"}, ["fix(core): stop", "feat: go"], True),
        ({"matches": r"\A[a-z]+(\([a-z]+\))?: \S"}, ["Fix: stop"], False),
        ({"sentences": 2}, ["It is 3.5 m, e.g. here. No more."], True),
        ({"sentences": 2}, ["One. Two! Three?"], False),
        ({"sentences": 1}, ["find surgeon in cardiology."], True),
        ({"sentences": 1}, ["find surgeon. read note."], False),
        ({"words": 3}, ["one, two three!"], True),
        ({"words": 3}, ["one two three four"], False),
        ({"calls_before": ["find", "answer"]}, [FIND, "hm", ANSWER], True),
        ({"calls_before": ["find", "answer"]}, [FIND], True),
        ({"calls_before": ["find", "answer"]}, [ANSWER, FIND], False),
        ({"calls_before": ["find", "answer"]}, ["hm"], False),
        ({"calls": {"tool": "find"}}, [FIND], True),
        ({"calls": {"tool": "find", "arguments": {"page": 2}}}, [f"I look. {FIND}"], True),
        ({"calls": {"tool": "find", "arguments": {"page": 3}}}, [FIND], False),
        ({"calls": {"tool": "find", "arguments": {"note": None}}}, [FIND], False),
        ({"calls": {"tool": "find"}}, [FIND, ANSWER], False),
    ],
)
def test_a_check_looks_at_every_answer(
    given: dict[str, Any], texts: list[str], obeyed: bool
) -> None:
    assert obeys(check(**given), [GovernedTurn(text) for text in texts], JSON) is obeyed


@pytest.mark.parametrize(
    ("how", "text", "obeyed"),
    [
        ("equals", " find a. ", True),
        ("equals", "I find a.", False),
        ("contains", "I find a.", True),
    ],
)
def test_an_answer_is_compared_with_what_its_turn_expects(
    how: str, text: str, obeyed: bool
) -> None:
    turns = [GovernedTurn("read note 1.", "read note 1."), GovernedTurn(text, "find a.")]
    assert obeys(check(expected=how), turns, JSON) is obeyed


def test_calls_at_a_desk_are_its_words() -> None:
    turns = [GovernedTurn("find sodium in urology."), GovernedTurn("read note 7.")]
    assert obeys(check(calls_before=["find", "read"]), turns, DESK)
    assert not obeys(check(calls_before=["find", "read"]), turns[::-1], DESK)
    assert obeys(check(calls={"tool": "read", "arguments": {"note": 7}}), turns[1:], DESK)


def test_a_regular_expression_that_does_not_end_is_interrupted() -> None:
    with pytest.raises(TimeoutError):
        obeys(check(matches=r"(a|aa)+b(?<=c)\Z"), [GovernedTurn("a" * 60)], JSON)
