"""A step none of whose episodes has a reward is told, with the commonest reason."""

from collections.abc import Sequence

import pytest

from cartridge_forge.plugins.episodes.environments.failures import (
    all_failed,
    commonest_reason,
    not_judged,
    reason,
)
from cartridge_forge.protocols.episodes import Episode, Observation, RewardOutcome, Task, Turn
from cartridge_forge.protocols.step import Sampling
from cartridge_forge.protocols.teacher_replay import AgentMessage

RAISED = Observation(done=True, error="environment_refused: ValueError: too late (guess.py:12)")


def ended(kind: str, *seen: Observation, reward: float | None = None, **more: object) -> Episode:
    turns = tuple(Turn((1,), (2,), (-0.5,), (0,), "up", o) for o in seen)
    return Episode(
        Task("t/0", "rules", {}), "t/0", Observation(), turns, Sampling(), reward, kind, **more
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("episode", "told"),
    [
        (ended("environment_refused", Observation(), RAISED), RAISED.error),
        (
            ended("reward_failed", Observation(done=True), rewards={
                "brief": RewardOutcome(1.0),
                "right": RewardOutcome(None, "rewards.py:7: ZeroDivisionError: by zero", True),
            }),
            "reward_failed: right: rewards.py:7: ZeroDivisionError: by zero",
        ),
        (
            ended("no_verdict", Observation(
                (AgentMessage("tool", "write one JSON object"),), error_kind="bad_action"
            )),
            "no_verdict after bad_action: write one JSON object",
        ),
        (ended("context_full"), "context_full: its context exceeds episodes.max_context"),
        (ended("environment_unheard_of"), "environment_unheard_of"),
    ],
)  # fmt: skip
def test_the_reason_names_its_place(episode: Episode, told: str) -> None:
    assert reason(episode) == told


def test_an_opening_that_fails_is_the_reason() -> None:
    died = Observation(done=True, error="environment_died: no answer within 5 s")
    episode = Episode(Task("t", "d", {}), "t", died, (), Sampling(), None, "environment_died")
    assert reason(episode) == died.error


@pytest.mark.parametrize(
    "episodes",
    [(), (ended("context_full"), ended("", Observation(done=True), reward=0.0))],
)
def test_one_reward_is_enough(episodes: Sequence[Episode]) -> None:
    assert all_failed(episodes) is None


def test_the_commonest_reason_is_told() -> None:
    raised = ended("environment_refused", RAISED)
    assert all_failed([raised, ended("context_full"), raised]) == (
        "none of 3 episodes has a reward; 2 of them: environment_refused: ValueError: too late "
        "(guess.py:12); forge env check MESH plays a few"
    )


def test_a_failure_of_the_environment_or_a_reward_judges_nobody() -> None:
    kinds = ["environment_died", "", "reward_failed", "context_full", "no_verdict"]
    episodes = [ended(kind) for kind in kinds]
    assert not_judged(episodes) == [episodes[0], episodes[2]]
    assert commonest_reason([episodes[0], episodes[2], episodes[2]]) == "2 of them: reward_failed"
