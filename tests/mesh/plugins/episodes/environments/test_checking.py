"""What `forge env check` says of environments that train, and of those that would not."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.plugins.episodes.environments.checking import (
    CheckPlan,
    check_environment,
    drawn_value,
    findings_of,
)
from cartridge_forge.plugins.episodes.environments.checking import PlayedEpisode as Played
from cartridge_forge.plugins.episodes.spec.environment import EnvironmentSpec
from cartridge_forge.protocols.episodes import Observation, Task
from cartridge_forge.protocols.teacher_replay import AgentMessage

FOLDER = str(Path(__file__).parents[4] / "data" / "environments")


def found(factory: str, plan: CheckPlan, **keys: Any) -> tuple[list[tuple[bool, str]], list[Any]]:
    spec = EnvironmentSpec(
        kind="python", factory=f"user_games:{factory}", folder=FOLDER, processes=1, **keys
    )
    check = asyncio.run(check_environment(spec, plan))
    return [(f.fault, f.what) for f in check.findings], list(check.episodes)


def test_an_environment_that_a_script_can_solve_has_little_against_it() -> None:
    plan = CheckPlan(tasks=2, turns=9, script=tuple(str(n) for n in range(1, 10)))
    alike = (False, "the 2 tasks open alike")
    assert found("Lenient", plan)[0] == [
        (True, "all 2 rewards are 1"),
        (False, "2 of 4 episodes have no reward after 9 turns"), alike,
    ]  # fmt: skip
    findings, episodes = found("Lenient", plan, returns="last")
    assert findings == [alike]
    assert [e.agent for e in episodes] == ["scripted", "random"] * 2
    wanted = [random.Random(seed).randint(1, 9) for seed in (0, 2)]
    assert [len(e.actions) for e in episodes[::2]] == wanted
    assert [e.reward for e in episodes[::2]] == [1.0, 1.0]


def test_equal_rewards_equal_openings_and_long_texts_are_found() -> None:
    plan = CheckPlan(tasks=2, max_context=40, count=lambda text: len(text.split()))
    assert found("Alike", plan)[0] == [
        (True, "4 of 4 episodes are longer than 40 tokens, the longest about 104"),
        (False, "all 4 rewards are 0"),
        (False, "the 2 tasks open alike"),
    ]


def test_a_reward_that_a_replay_does_not_repeat_is_found() -> None:
    (finding,) = found("Lucky", CheckPlan(tasks=2))[0]
    assert finding == (
        True, "4 of 4 episodes differ when they are played again, the first after 1 actions",
    )  # fmt: skip


def test_a_class_that_cannot_be_made_is_the_only_finding() -> None:
    findings, episodes = found("breaks", CheckPlan())
    assert episodes == []
    assert "RuntimeError: no licence" in findings[0][1]


def an_episode(*seen: Observation, seconds: float = 0.1) -> Played:
    return Played(
        "random", Task("t/0", "x", {}), ("a",) * (len(seen) - 1), seen, (seconds,) * len(seen), seen
    )


OPENING = Observation((AgentMessage("user", "go."),))
OPEN = Observation((AgentMessage("tool", "no."),))
BAD = Observation((AgentMessage("tool", "no JSON object"),), error_kind="bad_action")
END = Observation(done=True, reward=0.5)


@pytest.mark.parametrize(
    ("keys", "episode", "what"),
    [({}, an_episode(OPENING, OPEN), "no reward arrived in 1 episodes of at most 8 turns"),
     ({}, an_episode(Observation(done=True, error="environment_died: gone")),
      "1 of 1 episodes ended as environment_died: gone"),
     ({"action": "json"}, an_episode(OPENING, BAD, BAD),
      "none of 2 actions fits its schema: no JSON object"),
     ({"action": "tool"}, an_episode(OPENING, END), "it offers no tools"),
     ({}, an_episode(OPENING, END, seconds=9.0), "a move takes 9 s, and up to 9 s of the 30 s"),
     ({}, an_episode(Observation((AgentMessage("user", " "),)), END), "an opening is empty")],
)  # fmt: skip
def test_what_an_episode_shows(keys: dict[str, Any], episode: Played, what: str) -> None:
    spec = EnvironmentSpec(kind="python", factory="x:A", **keys)
    assert any(f.what.startswith(what) for f in findings_of(spec, CheckPlan(), [episode]))


def test_values_are_drawn_from_a_schema() -> None:
    schema = {
        "type": "object",
        "$defs": {"Move": {"enum": ["up", "down"]}},
        "properties": {
            "move": {"$ref": "#/$defs/Move"}, "row": {"type": "integer", "minimum": 3,
            "maximum": 4}, "note": {"type": "string"}, "on": {"const": True},
            "some": {"type": "array", "items": {"type": "boolean"}},
            "metadata": {"type": "object"},
        },
    }  # fmt: skip
    rng = random.Random(0)
    values = [drawn_value(schema, ["word"], rng) for _ in range(40)]
    assert {v["move"] for v in values} == {"up", "down"}
    assert {v["row"] for v in values} == {3, 4}
    assert all(v["note"] == "word" and v["on"] is True for v in values)
    assert all(isinstance(v["some"][0], bool) and "metadata" not in v for v in values)
