"""Canonical actions: by hand, and by what must hold for all of them."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rooms.teachers.panel_setup import JSON, TYPED_STATE

from cartridge_forge.plugins.chat.messages import Action, TextAction, ToolAction
from cartridge_forge.plugins.replay.actions import action_of, canonical

ARGUMENTS = st.dictionaries(st.sampled_from(["i", "n", "s", "b", "l", "o", "x"]), JSON)

ACTIONS = st.builds(ToolAction, st.just("typed"), ARGUMENTS) | st.builds(TextAction, st.text())


@given(action=ACTIONS)
def test_a_canonical_action_stays_as_it_is(action: Action) -> None:
    once = canonical(action, TYPED_STATE)
    assert canonical(action_of(once), TYPED_STATE) == once


@given(arguments=ARGUMENTS, data=st.data())
def test_the_order_of_keys_and_the_space_around_words_do_not_matter(
    arguments: dict[str, Any], data: st.DataObject
) -> None:
    shuffled = dict(data.draw(st.permutations(list(arguments.items()))))
    padded = {k: f"\t {v}  " if isinstance(v, str) else v for k, v in shuffled.items()}
    said = [canonical(ToolAction("typed", a), TYPED_STATE) for a in (arguments, padded)]
    assert said[0] == said[1]
