"""Shifts: several cases with one reward."""

from __future__ import annotations

import pytest

from cartridge_forge.plugins.clinic.desk import (
    DeskCase,
    ShiftState,
    draw_case,
    draw_desk,
    draw_shift,
    reply_in_shift,
)
from cartridge_forge.protocols.errors import DataError

CASES = (DeskCase("surgeon", "cardiology", 17, "weber"), DeskCase("sodium", "urology", 40, "41"))
FIRST = ("find surgeon in cardiology.", "read note 17.", "answer weber.")
SECOND = ("find sodium in urology.", "read note 40.", "answer 41.")


def played(*texts: str, case_turns: int = 3) -> list[ShiftState]:
    states = [ShiftState()]
    for text in texts:
        states.append(reply_in_shift(CASES, states[-1], text, case_turns))
    return states[1:]


def told(state: ShiftState) -> tuple[str, str, bool, float | None]:
    assert state.reply is not None
    return state.reply.text, state.reply.question, state.reply.done, state.reply.reward


def test_a_shift_of_right_cases_is_rewarded_once() -> None:
    assert [told(s) for s in played(*FIRST, *SECOND)] == [
        ("note 17.", "", False, None),
        ("surgeon weber.", "", False, None),
        ("right.", "what is the sodium?", False, None),
        ("note 40.", "", False, None),
        ("sodium 41.", "", False, None),
        ("right.", "", True, 1.0),
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        ("answer weber.",),  # a right guess, then a wrong case
        ("find sodium in surgery.", "find sodium in urology.", "read note 40."),  # out of time
        ("find sodium in urology.", "read note 40.", "answer 14."),
    ],
)
def test_one_wrong_case_leaves_no_reward(wrong: tuple[str, ...]) -> None:
    last = played(*FIRST, *wrong)[-1]
    assert told(last)[2:] == (True, 0.0)
    assert (last.ended, last.right) == (2, 1)
    last = played(*(t.replace("sodium", "surgeon") for t in wrong), *SECOND)[-1]
    if wrong != ("answer weber.",):
        assert (last.ended, last.right, told(last)[3]) == (2, 1, 0.0)


def test_a_case_that_ends_in_an_error_keeps_its_hint() -> None:
    reply = played("find surgeon in urology.", case_turns=1)[-1].reply
    assert reply is not None
    assert (reply.error_kind, reply.hint_key) == ("missing_record", "where")
    assert reply.hint_facts == {"field": "surgeon", "department": "cardiology"}
    assert (reply.done, reply.reward, reply.question) == (False, None, "what is the sodium?")


def test_a_shift_asks_for_distinct_fields_and_begins_with_the_seed_s_case() -> None:
    desk = draw_desk(3, 1, 6)
    for seed in range(20):
        shift = draw_shift(desk, seed, 6)
        assert shift[0] == draw_case(desk, seed)
        assert {c.field: c.department for c in shift} == dict(desk.handbook)
        assert draw_shift(desk, seed, 6) == shift
        assert draw_shift(desk, seed, 1) == shift[:1]
    for wrong in (0, 7):
        with pytest.raises(DataError, match="a shift has 1 to 6 cases"):
            draw_shift(desk, 0, wrong)
