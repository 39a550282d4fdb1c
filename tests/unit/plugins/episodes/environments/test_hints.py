"""Hints: of templates, feedback and siblings; none but a sibling's tells the answer."""

import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from episode_setup import LOST, RIGHT, episode_of, seen_at_desk
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.chat.episodes import Episode, Observation, TurnHint
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.clinic.desk import HINTS
from cartridge_forge.plugins.environments.hints import (
    FailedTurn,
    checked_hint,
    failed_turns,
    feedback_hint,
    holds,
    leaks,
    sibling_hint,
    template_hint,
    words,
)


def failed(*said: str, see: Callable[[Sequence[str]], Observation] = seen_at_desk) -> FailedTurn:
    """The last turn of an episode in which a student says these words."""
    return FailedTurn(episode_of(said, see=see), len(said) - 1)


def hinted(text: str, why: str = "", turn: int = 0) -> TurnHint:
    return TurnHint("desk/12/0/1", turn, text, why)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (("find surgeon in urology.",), "the handbook says surgeon cardiology."),
        (("look note 17.",), "the tools are find read answer."),
        (("find surgeon.",), "say find surgeon in a department."),
        (("read 17.",), "say read note and its number."),
        (("answer",), "say answer and the value."),
        (("read note 3.",), "find surgeon first."),
        (("find surgeon in cardiology.", "read note 3."), "read note 17."),
    ],
)
def test_the_desk_has_a_template_for_every_failure(calls: tuple[str, ...], expected: str) -> None:
    turn = failed(*calls)
    assert turn.seen.error_kind
    assert template_hint(turn, HINTS) == hinted(expected, turn=len(calls) - 1)


def test_a_template_needs_its_facts() -> None:
    lost = failed("find surgeon in urology.")
    assert template_hint(lost, {"where": "look in {department}."}) == hinted("look in cardiology.")
    assert template_hint(lost, {"where": "the {ward}."}) == hinted("", "no_hint")
    assert template_hint(lost, {}) == hinted("", "no_hint")


def test_feedback_is_the_environments_own_text() -> None:
    assert feedback_hint(failed("find surgeon in urology.")) == hinted("no surgeon in urology.")


def test_feedback_that_reveals_the_answer_is_dropped() -> None:
    def see(actions: Sequence[str]) -> Observation:
        seen = seen_at_desk(actions)
        told = (AgentMessage("tool", "not so: it is WEBER."),)
        return replace(seen, messages=told, expected="weber") if actions else seen

    lost = failed("find surgeon in urology.", see=see)
    assert feedback_hint(lost) == hinted("not so: it is WEBER.", "leaks_answer")


def test_a_hint_with_the_answer_is_refused_and_kept_for_the_record() -> None:
    lost = failed("find surgeon in urology.")
    assert checked_hint(lost, " It is WEBER! ", "weber") == hinted("It is WEBER!", "leaks_answer")
    assert checked_hint(lost, "weber", None) == hinted("weber")
    assert checked_hint(lost, " ", "weber") == hinted("", "no_hint")
    assert checked_hint(lost, "", "weber", "writer_failed") == hinted("", "writer_failed")


def member(m: int, said: Sequence[str], group: str = "desk/12/0") -> Episode:
    e = episode_of(said)
    return replace(e, task=replace(e.task, id=f"{group}/{m}"), group=group)


def test_a_sibling_shows_how_the_task_is_done() -> None:
    """The shortest success of the group, in the episode's own words and without its question."""
    detour = ("find surgeon in urology.", *RIGHT)
    episodes = [
        member(0, LOST), member(1, detour), member(2, RIGHT), member(3, RIGHT),
        member(0, RIGHT[:1] + RIGHT[2:], "desk/13/0"),
    ]  # fmt: skip
    lost, other, *_ = failed_turns(episodes)
    assert (lost.episode.task.id, lost.turn) == ("desk/12/0/0", 0)
    shown = sibling_hint(lost, episodes, 1.0)
    assert shown == TurnHint(
        "desk/12/0/0", 0,
        "assistant: find surgeon in cardiology.\ntool: note 17.\n"
        "assistant: read note 17.\ntool: surgeon weber.\n"
        "assistant: answer weber.\ntool: right.",
    )  # fmt: skip
    assert leaks(shown.text, "weber")  # by construction
    assert sibling_hint(other, episodes, 1.0).turn == 1


@pytest.mark.parametrize("rewards", [(0.0, 0.9), (None, 0.0)])
def test_without_a_success_beside_it_a_turn_has_no_sibling(rewards: tuple[Any, Any]) -> None:
    """Neither a lesser reward, nor its own success, nor another task's."""
    own = replace(member(0, ("find surgeon in urology.", *RIGHT)), reward=1.0)
    others = [replace(member(i + 1, LOST), reward=r) for i, r in enumerate(rewards)]
    episodes = [own, *others, member(0, RIGHT, "desk/13/0")]
    (lost, *_) = failed_turns(episodes)
    assert sibling_hint(lost, episodes, 1.0) == TurnHint("desk/12/0/0", 0, "", "no_sibling")
    assert sibling_hint(lost, episodes, 0.5).why == ("" if 0.9 in rewards else "no_sibling")


@pytest.mark.parametrize(
    ("text", "answer", "leaking"),
    [
        ("the value is 41 gram.", "41 Gram", True),
        ("the value is 41.5 gram.", "41 gram", False),
        ("note 17.", "7", False),
        ("note 17.", "1", False),
        ("no note.", "no", True),
        ("a notable one.", "no", False),
        ("we-ber", "weber", True),
        ("the w e b e r", "weber", True),
        ("weberian", "weber", True),
        ("ＷＥＢＥＲ", "weber", True),  # full width  # noqa: RUF001
        ("-5 units", "5", False),
        ("ask again.", "", False),
        ("ask again.", "?", False),
    ],
)
def test_what_leaks(text: str, answer: str, leaking: bool) -> None:
    assert leaks(text, answer) is leaking


def test_words_are_folded() -> None:
    assert words("The  9.1 g/dl, note 17. -3") == ("the", "9.1", "g", "dl", "note", "17", "-3")
    assert not holds("anything", "")


@given(
    before=st.text(string.ascii_letters + " "), answer=st.text(string.ascii_letters, min_size=1),
    after=st.text(string.ascii_letters + " "),
)  # fmt: skip
def test_an_answer_among_words_always_leaks(before: str, answer: str, after: str) -> None:
    assert leaks(f"{before} {answer.upper()}, {after}", answer)


def test_a_sibling_of_several_cases_shows_all_of_them() -> None:
    """A shift's cases begin new conversations: no turn of an earlier one is lost."""
    lost, done = member(0, LOST), member(1, RIGHT)
    first, *others = done.turns
    begins = replace(first.observation, new_conversation=True)
    shift = replace(done, turns=(replace(first, observation=begins), *others))
    shown = sibling_hint(failed_turns([lost])[0], [lost, shift], 1.0)
    assert shown.text == (
        "assistant: find surgeon in cardiology.\ntool: note 17.\n"
        "assistant: read note 17.\ntool: surgeon weber.\n"
        "assistant: answer weber.\ntool: right."
    )
