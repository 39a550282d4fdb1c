"""Traces: an episode is written, goes through JSON, and is read back equal."""

import json
from dataclasses import replace
from typing import Any

import pytest
from episode_house import LOST, RIGHT, TEMPLATES, episode_of, task
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.episode_files import from_row, to_row
from protocols.episodes import Episode, Observation, Turn
from protocols.errors import DataError
from protocols.teacher_replay import AgentMessage, AgentTool
from protocols.types import Sampling

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


@settings(max_examples=30, deadline=None)
@given(episodes())
def test_what_is_written_is_read_back_equal(episode: Episode) -> None:
    row = json.loads(json.dumps(to_row(episode, "on_policy", 12), allow_nan=False))
    assert from_row(row) == episode


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("said", [RIGHT, LOST])
def test_episodes_at_the_desk_too(name: str, said: tuple[str, ...]) -> None:
    episode = replace(episode_of(said, name), flags=("copied",))
    assert from_row(json.loads(json.dumps(to_row(episode, "on_policy", 12)))) == episode


def test_a_row_by_hand() -> None:
    seen = Observation(
        (AgentMessage("tool", "note 17."),), error_kind="missing_record", hint_key="where"
    )
    turns = (
        Turn((4, 5), (7, 2), (-0.1, -0.7), (3, 3), "find", seen),
        Turn((4, 5, 7, 2, 40, 5), (9,), (-0.2,), (4,), "read", seen),
        Turn((4, 5), (9, 2), (-0.2, -0.3), (4, 4), "read", Observation(done=True, reward=1.0), 1),
    )
    episode = Episode(task(), "desk/12", Observation(), turns, Sampling(), 1.0, "", ("copied",))
    row = to_row(episode, "on_policy", 12)
    head = {k: row[k] for k in ("schema", "record", "arm", "step", "group", "reward", "flags")}
    assert head == {
        "schema": 1, "record": "episode", "arm": "on_policy", "step": 12, "group": "desk/12",
        "reward": 1.0, "flags": ["copied"],
    }  # fmt: skip
    assert row["branches"] == [[4, 5, 7, 2, 40, 5, 9], [4, 5, 9, 2]]
    spans = [(t["branch"], t["start"], t["stop"]) for t in row["turns"]]
    assert spans == [(0, 2, 4), (0, 6, 7), (1, 2, 4)]
    assert row["turns"][0]["sampler_logprobs"] == [-0.1, -0.7]
    assert row["turns"][0]["versions"] == [3, 3]
    assert row["turns"][0]["observation"]["hint_key"] == "where"


GOOD: dict[str, Any] = to_row(episode_of(RIGHT), "on_policy", 12)


@pytest.mark.parametrize(
    "row",
    [
        {},
        GOOD | {"schema": 2},
        GOOD | {"record": "pair"},
        GOOD | {"turns": [{}]},
        GOOD | {"branches": []},
        {k: v for k, v in GOOD.items() if k != "task"},
    ],
)
def test_other_rows_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="a row of an episode, schema 1, was expected: got another"):
        from_row(row)
