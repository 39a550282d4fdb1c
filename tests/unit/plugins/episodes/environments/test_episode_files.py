"""Traces: an episode is written, goes through JSON, and is read back equal."""

import json
from dataclasses import replace
from typing import Any

import pytest
from episode_setup import LOST, RIGHT, TEMPLATES, episode_of, task

from cartridge_forge.plugins.episodes.environments.episode_files import from_row, to_row
from cartridge_forge.protocols.episodes import Episode, Observation, Turn, TurnHint
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import Sampling
from cartridge_forge.protocols.teacher_replay import AgentMessage


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
        Turn((4, 5), (7, 2), (-0.1, -0.7), (3, 3), "find", seen, 0, "length"),
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


def test_the_hints_of_failed_turns_are_kept_beside_them() -> None:
    episode = episode_of(LOST)
    hints = [
        TurnHint("desk/12/0/1", 0, "the handbook says surgeon cardiology."),
        TurnHint("desk/12/0/1", 1, "it is weber.", "leaks_answer"),
    ]
    row = json.loads(json.dumps(to_row(episode, "on_policy", 12, hints)))
    found = [(t.get("hint"), t.get("no_hint")) for t in row["turns"]]
    assert found == [
        ("the handbook says surgeon cardiology.", ""),
        ("it is weber.", "leaks_answer"),
        (None, None),
    ]
    assert from_row(row) == episode


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
