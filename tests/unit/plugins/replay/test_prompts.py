"""What teachers are shown, and the hashes: what changes an answer changes its key, no more."""

import json
from dataclasses import replace

import pytest
from replay_setup import a_state, a_teacher, answer, canonical_read

from cartridge_forge.plugins.chat.messages import (
    AgentMessage,
    ReplayState,
    TeacherUsage,
    ToolAction,
)
from cartridge_forge.plugins.replay.budget import (
    OVERHEAD_TOKENS,
    cost,
    nanodollars,
    reported,
    worst_case,
)
from cartridge_forge.plugins.replay.prompts import (
    ANSWER_SCHEMA,
    HINT_INSTRUCTIONS,
    TeacherAnswer,
    call_key,
    read_answer,
    read_hint,
    render,
    render_hint,
    state_hash,
)
from cartridge_forge.plugins.replay.spec import PriceSpec, ReplayTeacherSpec

URL = "http://127.0.0.1:1/v1"


def key_of(teacher: ReplayTeacherSpec, state: ReplayState) -> str:
    return call_key(teacher, render(state), state)


def test_a_teacher_sees_the_state_and_not_what_the_student_did() -> None:
    prompt = render(a_state(7, options=("insulin", "metformin")))
    assert "Case 7. What was the hemoglobin?" in prompt.user
    assert "[tool]\nerror: no note 99" in prompt.user
    assert '"name":"read_value"' in prompt.system
    assert "A) insulin\nB) metformin" in prompt.system
    assert "99" not in prompt.system
    other = a_state(7, student_action=ToolAction("read_value", {"note": 1, "name": "x"}))
    assert render(other) == render(a_state(7))
    assert state_hash(other) == state_hash(a_state(7))


def test_a_hint_is_asked_for_after_the_error_and_read_from_text_answers_alone() -> None:
    state, teacher = a_state(7), a_teacher("a", URL)
    prompt = render_hint(state, "What now?")
    assert prompt.system.startswith(HINT_INSTRUCTIONS)
    assert prompt.user.endswith("error: no note 99\n\nWhat now?")
    assert '"name":"read_value"' in prompt.system
    assert render_hint(state, "").user.endswith("Write the hint.")
    assert call_key(teacher, prompt, state) != key_of(teacher, state)
    said = {"kind": "text", "tool": "", "arguments": "", "answer": " read note 3. "}
    assert read_hint(json.dumps(said)) == "read note 3."
    assert read_hint(json.dumps({**said, "kind": "tool"})) == ""
    assert read_hint("no JSON") == ""


def test_half_a_character_is_replaced() -> None:
    state = a_state(messages=(AgentMessage("user", "x\ud800y"),))
    assert "x?y" in render(state).user
    assert len(state_hash(state)) == 64


def test_the_key_follows_what_decides_the_answer() -> None:
    teacher, state = a_teacher("a", URL), a_state()
    key = key_of(teacher, state)
    assert key_of(a_teacher("a", URL + "/"), state) == key
    different = [
        key_of(teacher.model_copy(update=change), state)
        for change in (
            {"model": "other"},
            {"base_url": "http://127.0.0.1:2/v1"},
            {"max_tokens": 65},
            {"temperature": 0.0},
            {"provider": "anthropic"},
        )
    ]
    different += [
        key_of(teacher, replace(state, messages=state.messages[:2])),
        key_of(teacher, replace(state, tools=())),
        key_of(teacher, replace(state, options=("x", "y"))),
    ]
    assert len({key, *different}) == 9
    same = [
        key_of(teacher.model_copy(update={"name": "b", "concurrency": 1, "timeout_s": 9.0}), state),
        key_of(teacher, replace(state, trace_id="other", turn=5, error_kind="", confidence=0.1)),
    ]
    assert set(same) == {key}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (answer(3), canonical_read(3)),
        (answer(3).replace('"note": 3', '"note": "3"').replace('"3"', r"\"3\""), canonical_read(3)),
        ("", "unparseable: not the JSON asked for"),
        ("I would read note 3", "unparseable: not the JSON asked for"),
        ('{"kind":"tool"}', "unparseable: not the JSON asked for"),
        ('{"kind":"dance","tool":"","arguments":"","answer":""}', "unparseable: not the JSON"),
        (
            '{"kind":"tool","tool":"read_value","arguments":"[1]","answer":""}',
            "unparseable: arguments are no JSON object",
        ),
        (
            '{"kind":"tool","tool":"read_value","arguments":"{","answer":""}',
            "unparseable: arguments are no JSON object",
        ),
        (
            json.dumps(
                {"kind": "tool", "tool": "read_value", "answer": "",
                 "arguments": '{"note": NaN, "name": "x"}'}
            ),
            "unparseable: arguments are no JSON object",
        ),
        (
            json.dumps(
                {"kind": "tool", "tool": "read_value", "answer": "", "arguments": "[" * 100_000}
            ),
            "unparseable: arguments are no JSON object",
        ),
        (
            '{"kind":"tool","tool":"fly","arguments":"{}","answer":""}',
            "unparseable: unknown tool",
        ),
        (
            '{"kind":"tool","tool":"read_value","arguments":"","answer":""}',
            "unparseable: missing argument name",
        ),
        ('{"kind":"text","tool":"","arguments":"","answer":" "}', "unparseable: empty text"),
    ],
)  # fmt: skip
def test_reading_an_answer(raw: str, expected: str) -> None:
    canonical, error = read_answer(raw, a_state())
    if expected.startswith("unparseable"):
        assert canonical is None
        assert error.startswith(expected)
    else:
        assert (canonical, error) == (expected, "")


def test_the_schema_is_the_model_s_own() -> None:
    assert set(ANSWER_SCHEMA["properties"]) == set(TeacherAnswer.model_fields)
    assert ANSWER_SCHEMA["required"] == list(TeacherAnswer.model_fields)


def test_money_by_hand() -> None:
    prices = PriceSpec(input=1.25, output=10.0, cached=0.125)
    # 100 * 1250 + 40 * 125 + 7 * 10000
    assert cost(TeacherUsage(100, 7, 40), prices) == 200_000
    assert cost(TeacherUsage(100, 7, 40), PriceSpec(input=1.25, output=10.0)) == 245_000
    assert worst_case(500, 64, prices) == (500 + OVERHEAD_TOKENS) * 1250 + 64 * 10_000
    assert nanodollars(1.0) == 1_000_000_000
    assert nanodollars(0.1) == 100_000_000
    assert reported(0.0000012345) == 1235  # up: never less than was charged
