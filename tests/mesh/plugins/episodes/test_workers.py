"""Test rewards and Python environments in processes of their own."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.plugins.chat.episodes import (
    EnvironmentRequest,
    Observation,
    RewardOutcome,
    Task,
)
from cartridge_forge.plugins.chat.messages import AgentMessage, AgentTool
from cartridge_forge.plugins.environments.python.client import PythonEnvironment
from cartridge_forge.plugins.environments.rewards.workers import RewardWorker
from cartridge_forge.plugins.environments.spec import EnvironmentSpec, RewardSpec
from cartridge_forge.protocols.errors import DataError

BUDGET = 120.0
FUNCTIONS = """\
import asyncio, os, sys, time

def right(completion, answer):
    print("this goes nowhere")
    return completion == answer

def raises(completion):
    return 1 / (int(completion) - 4)

def hangs(completion):
    while completion == "4":
        time.sleep(60)
    return 1

def swallows(completion):
    while completion == "4":
        try:
            time.sleep(60)
        except BaseException:
            pass
    return 1

def eats(completion):
    return len([bytearray(2**20) for _ in range(2**12 if completion == "4" else 0)])

def exits(completion):
    sys.exit(3 if completion == "4" else 0)

def dies(completion):
    if completion == "4":
        os._exit(7)
    return 1

def odd(completion):
    return {"4": None, "5": float("nan"), "6": "1.0"}[completion]

async def late(completion):
    await asyncio.sleep(60 if completion == "4" else 0)
    return 1

def trl(prompts, completions, answer, **columns):
    given = zip(prompts, completions, answer)
    return [len(c) + 0.5 * (p == "2 + 2") + (a == "4") for p, c, a in given]

def secrets(completion):
    return float("WANDB_API_KEY" in os.environ)

def unknown(completion, solution):
    return 1

constant = 3
"""


def view(said: str) -> dict[str, Any]:
    message = {"role": "user", "content": "2 + 2"}
    return {
        "id": said, "prompt": "2 + 2", "plain": True, "opening": [message], "messages": [message],
        "completion": said, "completion_ids": [1, 2], "truncated": False, "turns": 1,
        "environment_reward": None, "document": "d", "columns": {"answer": "4"},
    }  # fmt: skip


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[..., RewardWorker]]:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    opened = []

    def of(name: str | None = None, **options: Any) -> RewardWorker:
        python = name and (name if ":" in name else f"mine:{name}")
        spec = RewardSpec(
            python=python, folder=str(tmp_path), memory_mib=512, **{"timeout_s": 30.0, **options}
        )
        opened.append(RewardWorker(spec))
        return opened[-1]

    yield of
    for one in opened:
        one.end()


def failed(why: str) -> RewardOutcome:
    return RewardOutcome(None, why, failed=True)


def values(outcomes: list[RewardOutcome]) -> list[float | None]:
    return [o.value for o in outcomes]


def test_a_function_gives_numbers_and_may_print(worker: Callable[..., RewardWorker]) -> None:
    one = worker("right")
    one.require(["answer"])
    assert one.outcomes([view("4"), view("5")], BUDGET) == [RewardOutcome(1.0), RewardOutcome(0.0)]


def test_a_function_of_trl_is_called_with_lists(worker: Callable[..., RewardWorker]) -> None:
    assert values(worker("trl").outcomes([view("4"), view("77")], BUDGET)) == [2.5, 3.5]


def test_what_raises_is_its_episodes_error_with_file_and_line(
    worker: Callable[..., RewardWorker],
) -> None:
    said = worker("raises").outcomes([view("4"), view("5"), view("x")], BUDGET)
    assert said[0] == failed("mine.py:8: ZeroDivisionError: division by zero")
    assert said[1] == RewardOutcome(1.0)
    assert said[2].why.startswith("mine.py:8: ValueError: invalid literal for int()")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("hangs", "mine.py:12: took longer than 1 s"),
        ("late", "mine.py:38: took longer than 1 s"),
        ("swallows", "took longer than 1 s"),
        ("eats", "mine.py:24: MemoryError: more than memory_mib (512)"),
        ("dies", "its process ended with 7"),
    ],
)
def test_a_limit_that_is_broken_is_one_episodes_error(
    worker: Callable[..., RewardWorker], name: str, why: str
) -> None:
    slow = name in ("hangs", "late", "swallows")
    one = worker(name, timeout_s=1.0 if slow else 30.0)
    said = one.outcomes([view("4"), view("5")], BUDGET)
    assert said[0] == failed(why)
    assert said[1].value == (0.0 if name == "eats" else 1.0)


def test_sys_exit_ends_no_process(worker: Callable[..., RewardWorker]) -> None:
    said = worker("exits").outcomes([view("4"), view("5")], BUDGET)
    assert said == [
        failed("mine.py:27: called sys.exit(3)"),
        failed("mine.py:27: called sys.exit(0)"),
    ]


def test_none_nan_and_text_are_left_out_and_are_no_failure(
    worker: Callable[..., RewardWorker],
) -> None:
    said = worker("odd").outcomes([view("4"), view("5"), view("6")], BUDGET)
    assert said == [
        RewardOutcome(None, "gave None"), RewardOutcome(None, "gave nan"),
        RewardOutcome(None, "gave str '1.0', which is no number"),
    ]  # fmt: skip


def test_no_secret_reaches_a_function(
    worker: Callable[..., RewardWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "WANDB_API_KEY", "not for you")
    assert values(worker("secrets").outcomes([view("4")], BUDGET)) == [0.0]


def test_episodes_beyond_the_steps_time_have_failed(worker: Callable[..., RewardWorker]) -> None:
    said = worker("right").outcomes([view("4")], 0.0)
    assert said[0].failed
    assert said[0].why.startswith("not called")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:f", "there is no module nowhere, in "),
        ("mine:nothing", "mine:nothing: its module has no nothing; correct the name"),
        ("mine:constant", "mine:constant is int 3, no function"),
        ("broken:f", "broken:f cannot be imported: broken.py:2: SyntaxError"),
        ("early:f", "early:f cannot be imported: early.py:1: RuntimeError: no"),
        ("unknown", "mine:unknown asks for 'solution', which no row has; known are answer, comp"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_a_run(
    worker: Callable[..., RewardWorker], tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "early.py").write_text("raise RuntimeError('no')\n")
    with pytest.raises(DataError) as refused:
        worker(name).require(["answer"])
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("options", "texts", "expected"),
    [
        ({"verifier": "exact"}, ["The answer is 4.", "5"], [1.0, 0.0]),
        ({"verifier": "math"}, [r"so \boxed{8/2}", "4"], [1.0, 0.0]),
        ({"verifier": "regex", "pattern": r"^\d+$"}, ["4", "four"], [1.0, 0.0]),
        (
            {"verifier": "json_schema", "json_schema": {"type": "object", "required": ["a"]}},
            ['{"a": 4}', "{}", "no JSON"],
            [1.0, 0.0, 0.0],
        ),
    ],
)
def test_our_verifiers(
    worker: Callable[..., RewardWorker],
    options: dict[str, Any],
    texts: list[str],
    expected: list[float],
) -> None:
    one = worker(**options)
    one.require(["answer"])
    assert values(one.outcomes([view(text) for text in texts], BUDGET)) == expected


FOLDER = str(Path(__file__).parents[3] / "data" / "environments")


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
