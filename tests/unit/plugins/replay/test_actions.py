"""Canonical actions: by hand, and by what must hold for all of them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_setup import a_state
from rooms.teachers.panel_setup import TYPED, TYPED_STATE

from cartridge_forge.plugins.chat.messages import (
    Action,
    AgentTool,
    OptionAction,
    TextAction,
    ToolAction,
)
from cartridge_forge.plugins.replay.actions import canonical, fault, letter
from cartridge_forge.protocols.errors import DataError

STATE = a_state()

OPTIONS = ("insulin", "Metformin", "a fever")

CHOOSING = a_state(options=OPTIONS, tools=())

FREE = a_state(tools=())

ANY = AgentTool("any", "Takes anything.", {"type": "object"})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"b": 1, "a": 2}, '{"a":2,"b":1}'),
        ({"x": 3.0, "y": -0.0, "z": 2.50}, '{"x":3,"y":0,"z":2.5}'),
        ({"x": "  two\n words "}, '{"x":"two words"}'),
        ({"x": "e\u0301"}, '{"x":"\u00e9"}'),
        ({"x": None, "y": 1}, '{"y":1}'),  # an optional argument that is null is left out
        ({"x": True, "y": "true"}, '{"x":true,"y":"true"}'),
        ({"x": "007"}, '{"x":"007"}'),  # nobody declared a number: an identifier stays one
        ({"x": {"b": 1.0, "a": [1.0, "u  v"]}}, '{"x":{"a":[1,"u v"],"b":1}}'),
        ({}, "{}"),
    ],
)
def test_arguments_as_they_come(arguments: dict[str, Any], expected: str) -> None:
    state = a_state(tools=(ANY,))
    said = canonical(ToolAction(" any ", arguments), state)
    assert said == f'{{"arguments":{expected},"tool":"any"}}'


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"i": "3"}, '{"i":3}'),
        ({"i": "3.0"}, '{"i":3}'),
        ({"i": "-0"}, '{"i":0}'),
        ({"i": "three"}, '{"i":"three"}'),
        ({"i": "007"}, '{"i":"007"}'),
        ({"i": "9" * 5000}, f'{{"i":"{"9" * 5000}"}}'),
        ({"n": "1e400"}, '{"n":"1e400"}'),
        ({"n": "2.50"}, '{"n":2.5}'),
        ({"s": 3.0}, '{"s":"3"}'),
        ({"s": 2.5}, '{"s":"2.5"}'),
        ({"s": True}, '{"s":true}'),
        ({"b": "True"}, '{"b":true}'),
        ({"l": ["1", 2.0]}, '{"l":[1,2]}'),
        ({"o": {"i": "4"}}, '{"o":{"i":4}}'),
    ],
)
def test_scalars_take_the_declared_type(arguments: dict[str, Any], expected: str) -> None:
    if arguments.get("n") == "1e400":
        # An infinite number has no JSON: the call is no action at all.
        with pytest.raises(DataError, match="JSON"):
            canonical(ToolAction("typed", arguments), a_state(tools=(TYPED,)))
        return
    said = canonical(ToolAction("typed", arguments), a_state(tools=(TYPED,)))
    assert said == f'{{"arguments":{expected},"tool":"typed"}}'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}])
def test_what_is_no_json_is_no_action(value: object) -> None:
    with pytest.raises(DataError, match="JSON"):
        canonical(ToolAction("any", {"x": value}), a_state(tools=(ANY,)))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("B", "B"),
        ("b", "B"),
        (" (b) ", "B"),
        ("B.", "B"),
        ("b) metformin", "B"),
        ("METFORMIN", "B"),
        ("a fever", "C"),  # its words, not the letter A
        ("A", "A"),
        ("A) metformin", None),  # letter and words disagree
        ("D", None),
        ("warfarin", None),
        ("", None),
    ],
)
def test_options(said: str, expected: str | None) -> None:
    assert letter(said, OPTIONS) == expected
    # The student's own words stand as they are where they name no option.
    assert json.loads(canonical(OptionAction(said), CHOOSING)) == {
        "choice": expected or " ".join(said.split())
    }


def test_options_that_read_alike_are_told_apart_by_their_letters_alone() -> None:
    assert letter("same", ("same", "Same")) is None
    assert letter("b", ("same", "Same")) == "B"


@pytest.mark.parametrize(
    ("action", "state", "expected"),
    [
        (ToolAction("read_value", {"note": 1, "name": "x"}), STATE, ""),
        (ToolAction("reed_value", {}), STATE, "unknown tool"),
        (ToolAction("read_value", {"note": 1}), STATE, "missing argument name"),
        (ToolAction("read_value", {"note": 1, "name": None}), STATE, "missing argument name"),
        (
            ToolAction("read_value", {"note": 1, "name": "x", "by": 2}),
            STATE,
            "unknown argument by",
        ),
        (ToolAction("any", {"whatever": 1}), a_state(tools=(ANY,)), ""),
        (OptionAction("B"), CHOOSING, ""),
        (OptionAction("E"), CHOOSING, "not one of the options"),
        (OptionAction("B"), STATE, "not one of the options"),
        (TextAction("B"), CHOOSING, "free text where an option is asked for"),
        (TextAction("halve it"), FREE, ""),
        (TextAction("  "), FREE, "empty text"),
    ],
)
def test_what_cannot_be_done(action: Action, state: Any, expected: str) -> None:
    assert fault(action, state) == expected


def test_free_text_is_folded_and_keeps_its_case() -> None:
    assert canonical(TextAction(" Halve\tthe  dose\n"), FREE) == '{"text":"Halve the dose"}'
    assert canonical(TextAction("halve the dose"), FREE) != canonical(
        TextAction("Halve the dose"), FREE
    )


@given(number=st.integers(-(2**53), 2**53))
def test_a_number_is_one_number_however_it_is_written(number: int) -> None:
    written = [number, float(number), str(number), f"{number}.0"]
    said = {canonical(ToolAction("typed", {"i": n}), TYPED_STATE) for n in written}
    assert said == {f'{{"arguments":{{"i":{number}}},"tool":"typed"}}'}
