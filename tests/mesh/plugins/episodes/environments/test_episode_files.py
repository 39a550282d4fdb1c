"""Traces: an episode is written, goes through JSON, and is read back equal."""

import json

from episode_setup import task
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.episodes.environments.episode_files import from_row, to_row
from cartridge_forge.protocols.episodes import Episode, Observation, Turn
from cartridge_forge.protocols.step import Sampling
from cartridge_forge.protocols.teacher_replay import AgentMessage, AgentTool

ids = st.lists(st.integers(0, 9), max_size=4).map(tuple)

texts = st.text(max_size=6)

observations = st.builds(
    Observation,
    messages=st.lists(st.builds(AgentMessage, st.sampled_from(["user", "tool"]), texts)).map(tuple),
    tools=st.lists(st.builds(AgentTool, texts, texts, st.dictionaries(texts, texts))).map(tuple),
    done=st.booleans(),
    reward=st.none() | st.floats(-2, 2),
    error_kind=texts,
    hint_facts=st.dictionaries(texts, texts),
    error=texts,
    expected=st.none() | texts,
)


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    turns: list[Turn] = []
    for _ in range(draw(st.integers(0, 4))):
        context, branch = draw(ids), 0
        if turns:
            last = turns[-1]
            grows = draw(st.booleans())
            context = (*last.context_ids, *last.response_ids, *context) if grows else context
            branch = last.branch + (not grows)
        response = draw(ids)
        logprobs = tuple(draw(st.floats(-9, 0)) for _ in response)
        versions = tuple(draw(st.integers(0, 9)) for _ in response)
        turns.append(
            Turn(context, response, logprobs, versions, draw(texts), draw(observations), branch)
        )
    reward = draw(st.none() | st.floats(-2, 2))
    kind = "no_verdict" if reward is None else ""
    return Episode(
        task(), draw(texts), draw(observations), tuple(turns), Sampling(max_tokens=7), reward,
        kind, tuple(draw(st.lists(texts, max_size=2))),
    )  # fmt: skip


@given(episodes())
def test_what_is_written_is_read_back_equal(episode: Episode) -> None:
    row = json.loads(json.dumps(to_row(episode, "on_policy", 12), allow_nan=False))
    assert from_row(row) == episode
