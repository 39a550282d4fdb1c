"""Contexts in exact tokens: what was sampled stays as it is, under every kind of template."""

from typing import Any

import pytest
from episode_setup import ASKED, TEMPLATES, conversation, ids_of, turn_of
from hypothesis import given, settings
from hypothesis import strategies as st

from cartridge_forge.plugins.chat.episodes import Turn
from cartridge_forge.plugins.chat.messages import AgentMessage


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_context_begins_with_the_turn_before_or_branches(name: str, data: Any) -> None:
    talk, turns = conversation(name), list[Turn]()
    pieces = st.sampled_from([*range(3, 300), *ids_of("<think>", name), *ids_of("</think>", name)])
    for _ in range(3):
        context, branch = talk.context("desk_01", ASKED, turns)
        if turns:
            stood = (*turns[-1].context_ids, *turns[-1].response_ids)
            assert branch == turns[-1].branch + (context[: len(stood)] != stood)
        ids = tuple(data.draw(st.lists(pieces, max_size=12)))
        role = data.draw(st.sampled_from(["tool", "user"]))
        made = turn_of(ids, context, AgentMessage(role, data.draw(st.text(max_size=8))), name=name)
        turns.append(Turn(**{**vars(made), "branch": branch}))
