"""Rollouts in lockstep: one call of each port a turn, and the same episodes whoever is beside."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from episode_setup import (
    LOST,
    RIGHT,
    Desk,
    Students,
    conversation,
    episode_of,
    seen_at_desk,
    task,
)

from cartridge_forge.plugins.episodes.environments.rollout import over_cartridge, run_episodes
from cartridge_forge.protocols.episodes import EnvironmentRequest, Episode, Observation, Task
from cartridge_forge.protocols.errors import PublishError
from cartridge_forge.protocols.step import BARE, Completion, GenerateRequest, PrefixRef, Sampling
from cartridge_forge.protocols.streams import refused

TALK = conversation()


def seed_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def script(member: int, turn: int) -> str:
    return (RIGHT, LOST)[member % 2][turn]


def run(
    desk: Desk, students: Any, tasks: Sequence[Task] = (task(),), **settings: Any
) -> list[Episode]:
    usual: dict[str, Any] = {
        "group_size": 2, "sampling": Sampling(), "prefix": over_cartridge(3), "seed_of": seed_of,
        "max_context": 500, "max_turns": 3,
    }  # fmt: skip
    return asyncio.run(run_episodes(tasks, students, desk, TALK, **usual | settings))


def test_one_call_of_each_port_a_turn() -> None:
    desk, students = Desk(), Students(TALK, script)
    tasks = (task("desk/12/0"), task("desk/12/1"))
    right, lost, *others = run(desk, students, tasks)
    assert [len(batch) for batch in students.batches] == [4, 4, 4]
    assert [len(batch) for batch in desk.batches] == [4, 4, 4, 4]
    assert desk.batches[0][1] == EnvironmentRequest(replace(tasks[0], id="desk/12/0/1"))
    assert [a.strip() for a in desk.batches[2][1].actions] == list(LOST[:2])
    request = students.batches[1][2]
    assert request.id == "desk/12/1/0/1"
    assert request.prefix == PrefixRef("cartridge/desk_01", 3)
    assert request.seed == seed_of("desk/12/1/0/1")
    assert request.prompt_ids == others[0].turns[1].context_ids
    assert (right.reward, right.error_kind, len(right.turns)) == (1.0, "", 3)
    assert (lost.reward, lost.group, lost.task.id) == (0.0, "desk/12/0", "desk/12/0/1")
    kinds = ["missing_record", "unknown_tool", ""]
    assert [t.observation.error_kind for t in lost.turns] == kinds
    assert lost == episode_of(LOST)


def test_an_episode_does_not_hang_on_those_beside_it() -> None:
    together = run(Desk(), Students(TALK, script), (task("a"), task("b")))
    alone = run(Desk(), Students(TALK, script), (task("b"),))
    assert together[2:] == alone
    assert together == run(Desk(), Students(TALK, script), (task("a"), task("b")))
    assert run(Desk(), Students(TALK, script), ()) == []


def test_those_that_ended_are_not_asked_again() -> None:
    students = Students(TALK, lambda m, t: "answer weber." if m else RIGHT[t])
    desk = Desk()
    run(desk, students)
    assert [len(batch) for batch in students.batches] == [2, 1, 1]
    assert [len(batch) for batch in desk.batches] == [2, 2, 1, 1]


def test_a_world_that_dies_costs_the_reward() -> None:
    def dies(actions: Sequence[str]) -> Observation:
        lost = actions and actions[-1].strip() == "look note 17."
        return Observation(error="environment_died: gone") if lost else seen_at_desk(actions)

    right, lost = run(Desk(dies), Students(TALK, script))
    assert right.reward == 1.0
    assert (lost.reward, lost.error_kind, len(lost.turns)) == (None, "environment_died", 2)

    students = Students(TALK, script)
    dead, _ = run(Desk(lambda _: Observation(error="environment_died")), students)
    assert (dead.reward, dead.error_kind, dead.turns) == (None, "environment_died", ())
    assert students.batches == []


def test_no_verdict_and_full_contexts() -> None:
    (early, _) = run(Desk(), Students(TALK, script), max_turns=2)
    assert (early.reward, early.error_kind, len(early.turns)) == (None, "no_verdict", 2)
    second = len(early.turns[1].context_ids)
    (whole, _) = run(Desk(), Students(TALK, script), max_turns=2, max_context=second)
    assert whole == early
    (full, _) = run(Desk(), Students(TALK, script), max_context=second - 1)
    assert (full.reward, full.error_kind, len(full.turns)) == (None, "context_full", 1)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_an_end_without_a_finite_reward_is_no_verdict(reward: float | None) -> None:
    def ends(actions: Sequence[str]) -> Observation:
        return Observation(done=True, reward=reward) if actions else seen_at_desk(())

    episode, _ = run(Desk(ends), Students(TALK, script))
    assert (episode.reward, episode.error_kind) == (None, "no_verdict")


def test_a_refused_request_ends_the_run() -> None:
    async def refuses(requests: Sequence[GenerateRequest]) -> list[Completion]:
        return [refused(r, "no version 3") for r in requests]

    with pytest.raises(PublishError, match=r"desk/12/0/0/0: no version 3"):
        run(Desk(), refuses)


def test_evaluation_may_read_the_document_or_none() -> None:
    students = Students(TALK, script)
    run(Desk(), students, prefix=lambda _: BARE)
    question = episode_of(RIGHT).opening
    assert students.batches[0][0].prefix == PrefixRef("document/none", 0)
    assert students.batches[0][0].prompt_ids == TALK.opening(None, question.messages)


def test_episodes_are_handed_over_in_the_turn_that_ends_them() -> None:
    told: list[list[Episode]] = []

    async def ended(episodes: Sequence[Episode]) -> None:
        told.append(list(episodes))

    students = Students(TALK, lambda m, t: "answer weber." if m == 1 else RIGHT[t])
    episodes = run(Desk(), students, group_size=3, ended=ended)
    assert told == [[episodes[1]], [], [episodes[0], episodes[2]]]
    # One that is still on after the last turn ends by that.
    told.clear()
    (cut,) = run(Desk(), Students(TALK, script), group_size=1, max_turns=1, ended=ended)
    assert (cut.error_kind, told) == ("no_verdict", [[], [cut]])
