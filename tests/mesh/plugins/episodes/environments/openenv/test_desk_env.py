"""The desk as an environment: what it says, and that playing again says the same."""

from typing import Any

import pytest
from desk_tasks import a_task, its_case, solution
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.clinic.desk import MAX_CALL_CHARS, bounded
from cartridge_forge.plugins.episodes.environments.openenv.desk_env import (
    DeskAction,
    DeskEnvironment,
    DeskObservation,
    DeskState,
)
from cartridge_forge.protocols.errors import DataError, RunError

TASK = a_task(max_turns=6)
CASE = its_case(TASK)
CALLS = st.one_of(
    st.sampled_from(
        [*solution(TASK)[:2], "find sodium in nowhere.", "read note 1.", "answer.", "sing.", "read"]
    ),
    st.text(max_size=30),
    st.sampled_from(["find ", "read note 1 ", "x"]).map(lambda start: start * 200),
)


def play(actions: list[str]) -> tuple[DeskEnvironment, list[DeskObservation], list[DeskState]]:
    """Until it is done: the environment, and what was seen and the state after 0, 1, .. actions."""
    env = DeskEnvironment()
    seen, states = [env.reset(**TASK.arguments)], [env.state]
    for action in actions:
        if seen[-1].done:
            break
        seen.append(env.step(DeskAction(text=action)))
        states.append(env.state)
    return env, seen, states


def test_a_case_is_solved_and_judged() -> None:
    _, seen, states = play(list(solution(TASK)))
    assert [o.messages[0]["content"] for o in seen] == [
        f"what is the {CASE.field}?", f"note {CASE.note}.", f"{CASE.field} {CASE.value}.", "right.",
    ]  # fmt: skip
    assert [(o.done, o.reward) for o in seen] == [(False, None)] * 3 + [(True, 1.0)]
    assert ["expected" in o.metadata for o in seen] == [False, False, False, True]
    assert seen[-1].metadata["expected"] == CASE.value
    assert [tool["name"] for tool in seen[0].tools] == ["find", "read", "answer"]
    assert [m["role"] for m in states[-1].history] == ["user"] + ["assistant", "tool"] * 3
    assert states[-1].step_count == 3


@pytest.mark.parametrize(
    ("call", "kind", "hint"),
    [
        (f"find {CASE.field} in nowhere.", "missing_record", "where"),
        ("sing.", "unknown_tool", "tools"),
        ("read 12", "bad_arguments", "form_of_read"),
        (f"answer {'x' * MAX_CALL_CHARS}", "bad_arguments", "form_of_answer"),
        ("y" * 10_000, "unknown_tool", "tools"),
    ],
)
def test_a_failed_call_is_marked(call: str, kind: str, hint: str) -> None:
    _, seen, _ = play([call])
    marks = seen[-1].metadata
    assert (marks["error_kind"], marks["hint_template_key"]) == (kind, hint)
    assert CASE.value not in str(marks)
    assert not seen[-1].done


def test_a_call_is_bounded_where_it_says() -> None:
    longest = "answer " + "x" * (MAX_CALL_CHARS - 7)
    assert bounded(longest) == longest
    assert bounded(longest + "x") == "answer"
    assert bounded(" " * 500) == ""


@given(st.lists(CALLS, max_size=8))
def test_playing_again_gives_what_was_seen_at_every_turn(actions: list[str]) -> None:
    env, seen, states = play(actions)
    for turn, (observation, state) in enumerate(zip(seen, states, strict=True)):
        again = DeskEnvironment()
        assert again.reset(**TASK.arguments, replay_actions=actions[:turn]) == observation
        assert again.state == state
    assert env.state == states[-1]


def test_the_turns_are_counted() -> None:
    _, seen, _ = play(["sing."] * 10)
    assert len(seen) == 7
    assert (seen[-1].done, seen[-1].reward) == (True, 0.0)


def test_an_episode_that_is_not_open_is_refused() -> None:
    with pytest.raises(RunError, match="reset first"):
        DeskEnvironment().step(DeskAction(text="sing."))
    env, _, _ = play(list(solution(TASK)))
    with pytest.raises(RunError, match="reset first"):
        env.step(DeskAction(text="sing."))


@pytest.mark.parametrize("wrong", [{"max_turns": 0}, {"fields": 0}])
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"must be >= 1|a handbook has"):
        DeskEnvironment().reset(**dict(TASK.arguments) | wrong)


def test_a_shift_begins_a_conversation_with_every_case() -> None:
    env = DeskEnvironment()
    env.reset(**{**TASK.arguments, "cases": 2, "max_turns": 7})
    seen = [env.step(DeskAction(text=text)) for text in [*solution(TASK), "answer nothing."]]
    assert [[m["role"] for m in o.messages] for o in seen] == [
        ["tool"], ["tool"], ["tool", "user"], ["tool"]
    ]  # fmt: skip
    assert [o.metadata.get("new_conversation") for o in seen] == [None, None, True, None]
    assert [(o.done, o.reward) for o in seen] == [(False, None)] * 3 + [(True, 0.0)]
    assert "expected" in seen[-1].metadata
    assert seen[-1].metadata["expected"] not in (CASE.value, "nothing")


def test_a_case_of_a_shift_has_its_share_of_the_turns() -> None:
    env = DeskEnvironment()
    env.reset(**{**TASK.arguments, "cases": 2, "max_turns": 7})
    seen = [env.step(DeskAction(text="sing.")) for _ in range(6)]
    assert [len(o.messages) for o in seen] == [1, 1, 2, 1, 1, 1]
    assert (seen[-1].done, seen[-1].reward) == (True, 0.0)
    assert "expected" not in seen[-1].metadata  # the first case had decided
    with pytest.raises(DataError, match="max_turns must be >= 2"):
        env.reset(**{**TASK.arguments, "cases": 2, "max_turns": 1})
