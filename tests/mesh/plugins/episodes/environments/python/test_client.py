"""A user's class in a process with limits: what it returns, and what it does wrong."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.plugins.episodes.environments.python.client import PythonEnvironment
from cartridge_forge.plugins.episodes.spec.environment import EnvironmentSpec
from cartridge_forge.protocols.episodes import EnvironmentRequest, Observation, Task
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.teacher_replay import AgentMessage, AgentTool

FOLDER = str(Path(__file__).parents[5] / "data" / "environments")


@asynccontextmanager
async def played(name: str, turns: int = 8, **keys: Any) -> AsyncIterator[PythonEnvironment]:
    spec = EnvironmentSpec(kind="python", factory=f"user_games:{name}", folder=FOLDER, **keys)
    environment = PythonEnvironment(spec, turns)
    try:
        await environment.start()
        yield environment
    finally:
        await environment.close()


def a_move(actions: Sequence[str] = (), name: str = "t/0", **arguments: Any) -> EnvironmentRequest:
    return EnvironmentRequest(Task(name, "python", {"seed": 7, **arguments}), tuple(actions))


async def walk(environment: PythonEnvironment, actions: Sequence[str]) -> list[Observation]:
    return [await environment.move(a_move(actions[:n])) for n in range(len(actions) + 1)]


def test_an_episode_is_what_the_class_says() -> None:
    wanted = random.Random(7).randint(1, 9)

    async def play() -> list[Observation]:
        async with played("Guess") as environment:
            return await walk(environment, ["0", str(wanted)])

    assert asyncio.run(play()) == [
        Observation((AgentMessage("user", "guess a number from 1 to 9."),)),
        Observation((AgentMessage("tool", "too low."),)),
        Observation((AgentMessage("tool", "right."),), done=True, reward=1.0),
    ]


def test_arguments_of_the_class_and_of_resets_arrive() -> None:
    async def play() -> tuple[Observation, Observation]:
        async with played("Guess", arguments={"most": 4}) as guess, played("Gym") as gym:
            return await guess.move(a_move()), await gym.move(a_move(start=2))

    first, second = asyncio.run(play())
    assert first.messages[0].content == "guess a number from 1 to 4."
    assert second.messages[0].content == '{"at": 2, "of": 3}'


@pytest.mark.parametrize(
    ("returns", "rewards"), [("at_done", [None, None, 0.25]), ("sum", [None, None, 0.5]),
                             ("last", [None, None, 0.25])],
)  # fmt: skip
def test_rewards_of_all_steps_count_as_the_key_says(
    returns: str, rewards: list[float | None]
) -> None:
    """Gymnasium's five values, an action in JSON, and a template of the observation's fields."""

    async def play() -> list[Observation]:
        keys = {"action": "json", "observation": "{at} of {of}", "returns": returns}
        async with played("Gym", **keys) as environment:
            return await walk(environment, ['go {"by": 1}', '{"by": 2}'])

    seen = asyncio.run(play())
    assert [o.messages[0].content for o in seen] == ["0 of 3", "1 of 3", "3 of 3"]
    assert [o.reward for o in seen] == rewards
    assert seen[-1].expected == "3"


def test_an_episode_ends_at_its_last_turn_with_the_sum_so_far() -> None:
    async def play() -> list[Observation]:
        async with played("Gym", turns=2, action="json", returns="sum") as environment:
            return await walk(environment, ['{"by": 0}', '{"by": 0}'])

    assert [(o.done, o.reward) for o in asyncio.run(play())] == [
        (False, None), (False, None), (True, 0.5),
    ]  # fmt: skip


def test_tools_and_coroutines() -> None:
    async def play() -> list[Observation]:
        async with played("Later", action="tool") as environment:
            return await walk(
                environment, ["five", 'so {"tool": "add", "arguments": {"a": 2, "b": 3}}']
            )

    opening, text, call = asyncio.run(play())
    (tool,) = opening.tools
    assert isinstance(tool, AgentTool)
    assert (tool.name, list(tool.parameters["properties"])) == ("add", ["a", "b"])
    assert text.error_kind == "bad_action"
    assert text.messages[0].content.startswith("no tool call in this text.")
    assert (call.done, call.reward, call.messages[0].content) == (True, 1.0, "5")


def test_tools_in_the_first_message() -> None:
    async def play() -> Observation:
        async with played("Later", action="tool", show_tools="message") as environment:
            return await environment.move(a_move())

    opening = asyncio.run(play())
    assert opening.tools == ()
    assert opening.messages[0].content == (
        "what is 2 + 3?\ntools:\n"
        '{"tool": "add", "about": "sum", "arguments": {"a": "integer", "b": "integer"}}'
    )


def test_a_replay_that_differs_ends_the_episode() -> None:
    async def play() -> Observation:
        async with played("Unseeded") as environment:
            assert not (await environment.move(a_move())).error
            environment._waiting.clear()
            return await environment.move(a_move(["1"]))

    assert asyncio.run(play()).error.startswith("environment_diverged: after 0 actions")


@pytest.mark.parametrize(
    ("text", "error"),
    [("raise", "environment_refused: ValueError: no such move (user_games.py:70)"),
     ("exit", "environment_refused: SystemExit: 3 (user_games.py:72)"),
     ("one", "environment_refused: TypeError: step returned 1 values"),
     ("die", "environment_died: it takes more than 1 s of processor time or 67,108,864 bytes"),
     ("spin", "environment_died: it takes more than 1 s of processor time or 67,108,864 bytes"),
     ("fill", "environment_refused: MemoryError (user_games.py:81)")],
)  # fmt: skip
def test_what_goes_wrong_is_that_episode_s_error(text: str, error: str) -> None:
    """Another episode of the same process goes on: it is replayed in the next process."""

    async def play() -> tuple[Observation, Observation]:
        limits = {"cpu_s": 1.0, "memory_mb": 64, "processes": 1, "timeout_s": 60.0}
        async with played("Faulty", **limits) as environment:
            await environment.move(a_move(name="other"))
            wrong = await environment.move(a_move([text]))
            return wrong, await environment.move(a_move(["on"], name="other"))

    wrong, other = asyncio.run(play())
    assert wrong.error.startswith(error)
    assert wrong.done
    assert other == Observation((AgentMessage("tool", "on."),))


def test_a_move_that_hangs_ends_at_its_time() -> None:
    async def play() -> tuple[Observation, Observation]:
        async with played("Faulty", timeout_s=2.0, processes=1) as environment:
            hung = await environment.move(a_move(["sleep"]))
            for _ in range(30):  # the next process starts within some moves' time
                other = await environment.move(a_move(["on"], name="other"))
                if not other.error:
                    break
            return hung, other

    hung, other = asyncio.run(play())
    assert hung.error.startswith("environment_died: ")
    assert not other.error


@pytest.mark.parametrize(
    ("factory", "error"),
    [("user_games:Stepless", "makes a Stepless, which has no method step"),
     ("user_games:breaks", "RuntimeError: no licence (user_games.py:93)"),
     ("user_games:Missing", "has no attribute 'Missing'"),
     ("no_such_module:Guess", "ModuleNotFoundError: No module named 'no_such_module'")],
)  # fmt: skip
def test_a_class_that_cannot_be_made_is_told_at_the_start(factory: str, error: str) -> None:
    async def start() -> None:
        spec = EnvironmentSpec(kind="python", factory=factory, folder=FOLDER)
        environment = PythonEnvironment(spec, 8)
        try:
            await environment.start()
        finally:
            await environment.close()

    with pytest.raises(DataError) as raised:
        asyncio.run(start())
    assert str(raised.value).startswith(f"the environment python ({factory}) cannot be made: ")
    assert error in str(raised.value)
