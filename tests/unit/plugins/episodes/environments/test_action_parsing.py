"""Dialects: what is said is parsed as the action that it was said for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.episodes.environments.action_parsing import DESK, JSON
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.teacher_replay import Action, OptionAction, TextAction, ToolAction

FIND = ToolAction("find", {"field": "surgeon", "department": "cardiology"})
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=5)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def test_the_desks_words() -> None:
    assert DESK.parse("find surgeon in cardiology.") == FIND
    assert DESK.say(FIND) == "find surgeon in cardiology."
    assert DESK.say(DESK.parse(" read  note 17")) == "read note 17."
    with pytest.raises(DataError, match="expresses tool calls only"):
        DESK.say(OptionAction("B"))


@given(tool=st.text(max_size=8), arguments=st.dictionaries(st.text(max_size=5), plain, max_size=3))
def test_json_calls_come_back_equal(tool: str, arguments: dict[str, object]) -> None:
    call = ToolAction(tool, arguments)
    assert JSON.parse(JSON.say(call)) == call
    assert JSON.parse(f"<think>{{}}</think>I call {JSON.say(call)} now.") == call


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('{"tool": "find", "arguments": {}}', ToolAction("find", {})),
        ('{"x": 1} {"tool": "a", "arguments": {"n": 2}}', ToolAction("a", {"n": 2})),
        ('<think>{"tool": "a", "arguments": {}}</think> weber ', TextAction("weber")),
    ],
)
def test_what_json_calls(text: str, action: Action) -> None:
    assert JSON.parse(text) == action


@pytest.mark.parametrize(
    "text",
    [
        '{"tool": "a", "arguments": {"n": NaN}}',
        '{"tool": "a", "arguments": {"n": 1e999}}',
        '{"tool": "a", "arguments": [1]}',
        '{"tool": 3, "arguments": {}}',
        "{{{",
        "",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert JSON.parse(text) == TextAction(text)


@given(st.text())
def test_any_words_are_some_action(text: str) -> None:
    assert isinstance(JSON.parse(text), ToolAction | TextAction)
    assert isinstance(DESK.parse(text), ToolAction)


def test_deep_nesting_is_no_call() -> None:
    assert isinstance(JSON.parse('{"a":' + "[" * 100_000), TextAction)


def test_choices_and_texts_are_said_as_they_are() -> None:
    assert (JSON.say(OptionAction("B")), JSON.say(TextAction("weber"))) == ("B", "weber")
