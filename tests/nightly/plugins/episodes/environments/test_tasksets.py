"""Faults of verifiers tasksets that are stepped, and plans of several turns as RSA's candidates."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.plugins.chat.episodes import EnvironmentRequest, Observation, Task
from cartridge_forge.plugins.environments.problems import open_problems
from cartridge_forge.plugins.environments.spec import EnvironmentSpec, ProblemsSpec
from cartridge_forge.plugins.environments.verifiers.stepped import TasksetEnvironment
from cartridge_forge.plugins.environments.verifiers.worker_process import PYTHON
from cartridge_forge.plugins.strategies.rsa.populations import JudgedCandidate
from cartridge_forge.protocols.errors import DataError

FOLDER = str(Path(__file__).parents[4] / "data" / "tasksets")

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make install-verifiers")


def last_seen(**keys: Any) -> Observation:
    """What is seen after both turns of the first task."""

    async def play() -> Observation:
        given = {"taskset": "forge_numbers", "tasks": 2, "timeout_s": 60.0, **keys}
        environment = TasksetEnvironment(
            EnvironmentSpec(kind="verifiers", folder=FOLDER, **given), most_turns=8
        )
        try:
            await environment.start()
            task = Task("n/0", "numbers", {"index": 0})
            for n in range(3):
                seen = await environment.move(EnvironmentRequest(task, ("5", "6")[:n]))
            return seen
        finally:
            await environment.close()

    return asyncio.run(play())


def test_what_a_taskset_raises_is_the_episode_s_error() -> None:
    error = last_seen(arguments={"fault": "raise"}).error
    assert error.startswith("environment_refused: ")
    assert "no rule for this" in error


def test_a_taskset_that_hangs_ends_at_the_move_s_time() -> None:
    seen = last_seen(arguments={"fault": "hang"}, timeout_s=3.0)
    assert seen.error == "environment_died: no answer within 3 s"


def test_a_taskset_with_too_few_tasks_is_told_at_the_start() -> None:
    with pytest.raises(DataError, match="has 2 tasks, fewer than the 5 of the environment"):
        last_seen(tasks=5)


def test_each_line_of_a_candidate_is_a_turn() -> None:
    spec = ProblemsSpec(
        kind="verifiers", name="forge_numbers", folder=FOLDER, most=2, turns=2, timeout_s=60.0
    )

    async def judge() -> list[JudgedCandidate]:
        problems = open_problems(spec, lambda text: text.strip() or None)
        try:
            (problem,) = await problems.draw([0], "primer")
            return await problems.judge(problem, ["5\n6", " 5\n\n6\n7", "5", "5\n7"])
        finally:
            await problems.close()

    assert [c.score for c in asyncio.run(judge())] == [1.0, 1.0, 0.0, 0.0]
