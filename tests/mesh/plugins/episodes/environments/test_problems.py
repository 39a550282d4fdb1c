"""Problems and what texts to them are worth: of the clinic, reasoning_gym and verifiers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from rooms.environments.problems_setup import over

from cartridge_forge.plugins.episodes.environments.problems import ProblemSet
from cartridge_forge.plugins.episodes.environments.verifiers.worker_process import PYTHON
from cartridge_forge.plugins.episodes.spec.problems import ProblemsSpec
from cartridge_forge.plugins.strategies.rsa.records import JudgedCandidate, RSAProblem
from cartridge_forge.protocols.errors import DataError

TASKSETS = Path(__file__).resolve().parents[4] / "data/tasksets"


async def gym(
    problems: ProblemSet, numbers: Sequence[int], texts: Sequence[str]
) -> tuple[list[RSAProblem], list[JudgedCandidate]]:
    drawn = await problems.draw(numbers, "primer")
    return drawn, await problems.judge(drawn[0], texts)


def test_reasoning_gym_draws_by_seed_and_judges_by_its_own_score() -> None:
    """`9**9**9**9` never ends: it costs its own worker, and the next answer asks another."""
    texts = ["answer 9**9**9**9", "no", "answer 1", "answer 94*4 - 61 - 6"]
    spec = ProblemsSpec(kind="reasoning_gym", name="countdown", seed=1, timeout_s=3.0)
    drawn, judged = over(spec, partial(gym, numbers=(0, 1), texts=texts))
    again, _ = over(spec, partial(gym, numbers=(0, 1), texts=[]))
    assert drawn == again
    assert drawn[0].question.startswith("Calculate 309 using all of these numbers: 6, 61, 94, 4.")
    assert [p.id for p in drawn] == ["countdown/0", "countdown/1"]
    assert drawn[0].question != drawn[1].question
    assert [c.answer for c in judged] == ["9**9**9**9", None, "1", "94*4 - 61 - 6"]
    assert [c.score for c in judged[:2]] == [0.0, 0.0]
    assert judged[2].score is not None
    assert judged[2].score < 1.0
    assert judged[3].score == 1.0


def test_an_unknown_task_is_named() -> None:
    spec = ProblemsSpec(kind="reasoning_gym", name="chain_sums")
    with pytest.raises(DataError, match=r"cannot draw chain_sums 0: .*; name one of its tasks"):
        over(spec, lambda p: p.draw([0], "primer"))


def taskset(name: str) -> ProblemsSpec:
    arguments = {"numbers": [4, 7, 11]}
    return ProblemsSpec(
        kind="verifiers", name=name, folder=str(TASKSETS), arguments=arguments, most=3,
        timeout_s=60.0,
    )  # fmt: skip


@pytest.mark.skipif(not PYTHON.exists(), reason="make install-verifiers")
def test_verifiers_rewards_each_text_as_an_episode_of_one_turn() -> None:
    async def use(problems: ProblemSet) -> tuple[list[RSAProblem], list[JudgedCandidate]]:
        drawn = await problems.draw([1, 2], "primer")
        with pytest.raises(DataError, match="has 3 problems: got number 3; lower"):
            await problems.draw([3], "primer")
        return drawn, await problems.judge(drawn[0], ["answer 8", "9", "answer 9"])

    drawn, judged = over(taskset("forge_sums"), use)
    assert [p.question for p in drawn] == ["after 7?", "after 11?"]
    assert judged == [
        JudgedCandidate("8", 1.0),
        JudgedCandidate(None, 0.0),
        JudgedCandidate("9", 0.0),
    ]


@pytest.mark.skipif(not PYTHON.exists(), reason="make install-verifiers")
def test_a_taskset_that_goes_on_asking_cannot_judge() -> None:
    """It sends a second turn, which no candidate has."""
    drawn, judged = over(
        taskset("forge_numbers"), partial(gym, numbers=[0], texts=["answer 5", "6"])
    )
    assert drawn[0].question == "after 4?"
    assert [c.score for c in judged] == [None, None]
    assert {c.error.partition(":")[0] for c in judged} == {"environment_refused"}
