"""Tasksets of verifiers, stepped turn by turn through the real worker process."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.plugins.chat.episodes import EnvironmentRequest, Observation, Task
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.environments.spec.environment import EnvironmentSpec
from cartridge_forge.plugins.environments.verifiers.stepped import TasksetEnvironment
from cartridge_forge.plugins.environments.verifiers.worker_process import PYTHON

FOLDER = str(Path(__file__).parents[5] / "data" / "tasksets")

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make install-verifiers")


@asynccontextmanager
async def played(turns: int = 8, **keys: Any) -> AsyncIterator[TasksetEnvironment]:
    given = {"taskset": "forge_numbers", "tasks": 2, "timeout_s": 60.0, **keys}
    environment = TasksetEnvironment(
        EnvironmentSpec(kind="verifiers", folder=FOLDER, **given), turns
    )
    try:
        await environment.start()
        yield environment
    finally:
        await environment.close()


def a_move(actions: Sequence[str], index: int = 0) -> EnvironmentRequest:
    return EnvironmentRequest(Task(f"n/{index}", "numbers", {"index": index}), tuple(actions))


async def walk(
    environment: TasksetEnvironment, actions: Sequence[str], index: int = 0
) -> list[Observation]:
    return [await environment.move(a_move(actions[:n], index)) for n in range(len(actions) + 1)]


def user(text: str) -> Observation:
    return Observation((AgentMessage("user", text),))


def test_episodes_of_several_turns_move_beside_each_other_and_are_replayed() -> None:
    """Two tasks in lockstep; then a lost session, and one that is wrong."""

    async def play() -> tuple[list[list[Observation]], Observation, Observation]:
        async with played() as environment:
            both = await asyncio.gather(
                walk(environment, ["5", "6"]), walk(environment, ["8", "9"], index=1)
            )
            await environment.move(a_move(["5"]))
            for sessions in environment._waiting.values():
                await environment._end(sessions.pop().handle)
            return (
                both,
                await environment.move(a_move(["5", "6"])),
                await environment.move(a_move(["5", "7"])),
            )

    (first, second), replayed, wrong = asyncio.run(play())
    end = Observation(done=True, reward=1.0)
    assert first == [user("after 4?"), user("and after that?"), end]
    assert second == [user("after 7?"), user("and after that?"), end]
    assert (replayed, wrong.reward) == (end, 0.0)


def test_a_taskset_s_tools_are_offered_and_called() -> None:
    async def play() -> list[Observation]:
        async with played(arguments={"task": {"tools": True}}) as environment:
            call = '{"tool": "successor", "arguments": {"number": 4}}'
            return await walk(environment, [call, "5", "6"])

    opening, called, asked, end = asyncio.run(play())
    assert [tool.name for tool in opening.tools] == ["successor"]
    assert called == Observation((AgentMessage("tool", "5"),))
    assert asked == user("and after that?")
    assert end.done
