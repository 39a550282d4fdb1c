"""Canonical actions: by hand, and by what must hold for all of them."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from replay_setup import READ, a_state

from protocols.teacher_replay import Action, AgentTool, TextAction, ToolAction
from teachers.actions import action_of, canonical

TYPED = AgentTool(
    "typed",
    "One argument of each type.",
    {
        "type": "object",
        "properties": {
            "i": {"type": "integer"},
            "n": {"type": "number"},
            "s": {"type": "string"},
            "b": {"type": "boolean"},
            "l": {"type": "array", "items": {"type": "integer"}},
            "o": {"type": "object", "properties": {"i": {"type": "integer"}}},
        },
    },
)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip

ARGUMENTS = st.dictionaries(st.sampled_from(["i", "n", "s", "b", "l", "o", "x"]), JSON)

ACTIONS = st.builds(ToolAction, st.just("typed"), ARGUMENTS) | st.builds(TextAction, st.text())

TYPED_STATE = a_state(tools=(TYPED, READ))


@settings(max_examples=80, deadline=None)
@given(action=ACTIONS)
def test_a_canonical_action_stays_as_it_is(action: Action) -> None:
    once = canonical(action, TYPED_STATE)
    assert canonical(action_of(once), TYPED_STATE) == once


@settings(max_examples=80, deadline=None)
@given(arguments=ARGUMENTS, data=st.data())
def test_the_order_of_keys_and_the_space_around_words_do_not_matter(
    arguments: dict[str, Any], data: st.DataObject
) -> None:
    shuffled = dict(data.draw(st.permutations(list(arguments.items()))))
    padded = {k: f"\t {v}  " if isinstance(v, str) else v for k, v in shuffled.items()}
    said = [canonical(ToolAction("typed", a), TYPED_STATE) for a in (arguments, padded)]
    assert said[0] == said[1]
