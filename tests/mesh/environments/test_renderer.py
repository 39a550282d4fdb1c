"""Contexts in exact tokens: what was sampled stays as it is, under every kind of template."""

from typing import Any

import pytest
from episode_setup import TEMPLATES, conversation, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.episodes import Observation, Turn
from protocols.teacher_replay import AgentMessage

QUESTION = AgentMessage("user", "what is the surgeon?")

ASKED = Observation((QUESTION,))


def ids_of(text: str, name: str = "shipped") -> tuple[int, ...]:
    return tuple(tokenizer(name)(text, add_special_tokens=False).input_ids)


def turn(ids: tuple[int, ...], context: tuple[int, ...], *said: AgentMessage, name: str) -> Turn:
    n = len(ids)
    text = conversation(name).decode(ids)
    return Turn(context, ids, (-0.5,) * n, (3,) * n, text, Observation(said))


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
        made = turn(ids, context, AgentMessage(role, data.draw(st.text(max_size=8))), name=name)
        turns.append(Turn(**{**vars(made), "branch": branch}))
