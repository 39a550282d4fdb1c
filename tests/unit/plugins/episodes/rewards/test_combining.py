"""The sum of rewards, and what an episode without one is called."""

from __future__ import annotations

import pytest

from cartridge_forge.plugins.chat.episodes import EnvironmentRequest, Episode, RewardOutcome, Turn
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.environments.rewards.combining import can_be_judged, judged, view_of
from cartridge_forge.plugins.environments.single_turn import answered_once, task_of
from cartridge_forge.plugins.environments.spec import RewardSpec
from cartridge_forge.protocols.step import Sampling

TASK = task_of("t/0", "d", (AgentMessage("user", "2 + 2"),), (), {"answer": 4, "level": 1})
REWARDS = (
    RewardSpec(verifier="exact", weight=2.0),
    RewardSpec(verifier="regex", pattern="x", weight=-0.5, name="marks"),
    RewardSpec(python="a:told", weight=0.0),
)


def episode(error_kind: str = "no_verdict") -> Episode:
    opening = answered_once(EnvironmentRequest(TASK))
    seen = answered_once(EnvironmentRequest(TASK, ("4",)))
    turn = Turn((1, 2), (7, 3), (-0.1, -0.2), (5, 5), "4", seen, finish_reason="length")
    return Episode(TASK, "t", opening, (turn,), Sampling(), None, error_kind)


def test_an_episode_of_a_row_is_one_answer() -> None:
    e = episode()
    assert e.opening.messages == (AgentMessage("user", "2 + 2"),)
    assert (e.turns[0].observation.done, e.turns[0].observation.expected) == (True, "4")
    seen = view_of(e)
    assert (seen["prompt"], seen["completion"], seen["truncated"]) == ("2 + 2", "4", True)
    assert seen["columns"] == {"answer": 4, "level": 1}
    assert seen["messages"][-1] == {"role": "assistant", "content": "4"}


def test_the_reward_is_the_weighted_sum() -> None:
    given = {"exact": RewardOutcome(1.0), "marks": RewardOutcome(3.0), "told": RewardOutcome(9.0)}
    found = judged(episode(), REWARDS, given)
    assert (found.reward, found.error_kind, found.rewards) == (0.5, "", given)


@pytest.mark.parametrize(
    ("name", "outcome", "kind"),
    [
        ("exact", RewardOutcome(None, "r.py:1: KeyError: 'a'", failed=True), "reward_failed"),
        ("marks", RewardOutcome(None, "gave None"), "reward_left_out"),
    ],
)
def test_an_episode_without_one_of_its_rewards_has_none(
    name: str, outcome: RewardOutcome, kind: str
) -> None:
    given = {r.title: RewardOutcome(1.0) for r in REWARDS} | {name: outcome}
    found = judged(episode(), REWARDS, given)
    assert (found.reward, found.error_kind) == (None, kind)


def test_a_reward_of_weight_0_is_only_recorded() -> None:
    given = {r.title: RewardOutcome(1.0) for r in REWARDS}
    given["told"] = RewardOutcome(None, "gave None")
    assert judged(episode(), REWARDS, given).reward == 1.5


def test_an_episode_that_broke_off_is_not_judged() -> None:
    assert can_be_judged(episode())
    assert can_be_judged(episode(""))
    assert not can_be_judged(episode("environment_died"))
