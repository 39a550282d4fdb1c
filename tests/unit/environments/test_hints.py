"""Hints: templates first, a writer second, none that tells the answer; failures are counted."""

import asyncio
import string
from collections.abc import Sequence

import pytest
from desk_tasks import replayed
from episode_setup import CASE, seen_at_desk
from hypothesis import given
from hypothesis import strategies as st

from environments.clinic.desk import HINTS, reply_to
from environments.hints import Hints, Writer, holds, leaks, words
from protocols.episodes import Observation
from protocols.teacher_replay import AgentMessage

LOST = seen_at_desk(("find surgeon in urology.",))
ASKED = (AgentMessage("user", "what is the surgeon?"), *LOST.messages)


def hint(hints: Hints, seen: Observation = LOST, expected: str | None = "weber") -> tuple[str, str]:
    return asyncio.run(hints.hint(seen, ASKED, expected))


def says(text: str) -> Writer:
    async def write(seen: Observation, messages: Sequence[AgentMessage]) -> str:
        assert (seen, messages) == (LOST, ASKED)
        return text

    return write


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
def test_the_desk_has_a_hint_for_every_failure(calls: tuple[str, ...], expected: str) -> None:
    reply = reply_to(CASE, replayed(CASE, calls[:-1], 4)[-1], calls[-1], 4).reply
    assert reply is not None
    assert reply.error_kind
    seen = Observation(hint_key=reply.hint_key, hint_facts=reply.hint_facts)
    assert hint(Hints(HINTS), seen, CASE.value) == (expected, "")


def test_templates_come_first_and_the_writer_second() -> None:
    assert hint(Hints({"where": "look in {department}."}, says("x"))) == ("look in cardiology.", "")
    assert hint(Hints({}, says(" ask the ward. "))) == ("ask the ward.", "")
    assert hint(Hints({"where": "the {ward}."}, says("ask."))) == ("ask.", "")
    assert hint(Hints({"where": "the {ward}."})) == ("", "no_hint")
    assert hint(Hints({}, says(" "))) == ("", "no_hint")


def test_a_hint_with_the_answer_is_refused() -> None:
    assert hint(Hints({}, says("It is WEBER!"))) == ("", "leaks_answer")
    assert hint(Hints({"where": "ask {department}."}), expected="cardiology") == (
        "",
        "leaks_answer",
    )
    assert hint(Hints({}, says("weber")), expected=None) == ("weber", "")


def test_a_writer_that_fails_or_hangs_costs_a_hint_alone() -> None:
    async def fails(seen: Observation, messages: Sequence[AgentMessage]) -> str:
        raise RuntimeError("no network")

    async def hangs(seen: Observation, messages: Sequence[AgentMessage]) -> str:
        await asyncio.sleep(3600)
        return ""

    assert hint(Hints({}, fails)) == ("", "writer_failed")
    assert hint(Hints({}, hangs, timeout_s=0.01)) == ("", "writer_timeout")


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
