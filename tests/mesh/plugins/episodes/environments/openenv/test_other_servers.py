"""Servers that are not ours, over OpenEnv's own server: echo, tools, schemas, rewards, faults."""

import asyncio
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, State
from openenv.core.env_server.types import Observation as ServedObservation
from openenv.core.rubrics.trajectory import ExponentialDiscountingTrajectoryRubric

from cartridge_forge.plugins.chat.episodes import EnvironmentRequest, Observation, Task
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.environments.checking import CheckPlan, check_environment
from cartridge_forge.plugins.environments.openenv.client import (
    OpenEnvClient,
    action_schema,
    check_action,
)
from cartridge_forge.plugins.environments.spec import EnvironmentSpec
from cartridge_forge.plugins.replay.fake_provider.server import LoopbackServer
from cartridge_forge.protocols.errors import DataError
from examples.calculator.server import calculator_app

# OpenEnv 0.10 reads a tool's schema by an older name, and we take warnings for errors.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing `Tool.inputSchema`")


class EchoAction(Action):
    message: str


class EchoObservation(ServedObservation):
    echoed_message: str = ""
    message_length: int = 0


class Echo(Environment[EchoAction, EchoObservation, State]):
    """As OpenEnv's echo environment: a reward in every step, and never an end."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
        return EchoObservation(echoed_message="echo environment ready!", reward=0.0)

    def step(self, action: EchoAction, timeout_s: float | None = None, **_: Any) -> Any:
        if action.message == "wait":
            time.sleep(1.0)
        if action.message == "raise":
            raise ValueError("no such message")
        size = len(action.message)
        return EchoObservation(
            echoed_message=action.message, message_length=size, reward=size * 0.1
        )

    @property
    def state(self) -> State:
        return State()


class GridAction(Action):
    row: int
    column: int


class GridObservation(ServedObservation):
    board: str
    left: int


class ColumnAction(Action):
    column: int


class ColumnObservation(ServedObservation):
    board: str = ""


class Columns(Environment[ColumnAction, ColumnObservation, State]):
    """A game whose action is a number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
        return ColumnObservation(board="empty")

    def step(self, action: ColumnAction, timeout_s: float | None = None, **_: Any) -> Any:
        return ColumnObservation(board=f"column {action.column}", done=True, reward=1.0)

    @property
    def state(self) -> State:
        return State()


class Rubric(ExponentialDiscountingTrajectoryRubric):
    """Reward the episode when it is done: RFC 004."""

    def score_trajectory(self, trajectory: Sequence[Any]) -> float:
        return sum(action.row for action, _ in trajectory) / 10


class Grid(Environment[GridAction, GridObservation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__(rubric=Rubric(gamma=0.9))
        self._left = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, size: int = 2) -> Any:
        self._left = size
        self._reset_rubric()
        return GridObservation(board="." * size, left=size)

    def step(self, action: GridAction, timeout_s: float | None = None, **_: Any) -> Any:
        self._left -= 1
        seen = GridObservation(board="x", left=self._left, done=self._left == 0)
        return seen.model_copy(update={"reward": self._apply_rubric(action, seen)})

    @property
    def state(self) -> State:
        return State()


@contextmanager
def served(environment: Any, action: Any, observation: Any, sessions: int = 64) -> Iterator[str]:
    app = create_fastapi_app(environment, action, observation, max_concurrent_envs=sessions)
    with LoopbackServer(app, "test environment", ws="websockets-sansio") as server:
        yield server.url


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    with served(Echo, EchoAction, EchoObservation) as url:
        yield url


@pytest.fixture(scope="module")
def grid() -> Iterator[str]:
    with served(Grid, GridAction, GridObservation) as url:
        yield url


@pytest.fixture(scope="module")
def calculator() -> Iterator[str]:
    with LoopbackServer(calculator_app(), "calculator", ws="websockets-sansio") as server:
        yield server.url


def walk(
    url: str, actions: Sequence[str], turns: int = 8, seed: int = 4, **keys: Any
) -> list[Observation]:
    """What is seen after 0, 1, .. of the actions."""

    async def play() -> list[Observation]:
        client = OpenEnvClient(EnvironmentSpec(kind="openenv", url=url, **keys), turns)
        task = Task("t/0", "openenv", {"seed": seed})
        try:
            await client.start()
            return [
                await client.move(EnvironmentRequest(task, tuple(actions[:n])))
                for n in range(len(actions) + 1)
            ]
        finally:
            await client.close()

    return asyncio.run(play())


@pytest.mark.parametrize("sessions", [1, 2])
def test_more_episodes_than_a_server_takes_sessions(sessions: int) -> None:
    """Six episodes of three turns, all at once in each turn, as a step plays them: whoever has no
    session waits, and replays."""

    async def play(url: str) -> tuple[list[list[Observation]], OpenEnvClient]:
        keys: dict[str, Any] = {"action_key": "message", "observation": "echoed_message"}
        spec = EnvironmentSpec(kind="openenv", url=url, returns="sum", **keys)
        client = OpenEnvClient(spec, 3)
        said = [["a" * (i + 1), "b", "c"] for i in range(6)]
        try:
            await client.start()
            seen = []
            for n in range(4):
                moves = [
                    EnvironmentRequest(Task(f"t/{i}", "openenv", {"seed": i}), tuple(texts[:n]))
                    for i, texts in enumerate(said)
                ]
                seen.append(await asyncio.gather(*map(client.move, moves)))
        finally:
            await client.close()
        return seen, client

    with served(Echo, EchoAction, EchoObservation, sessions) as url:
        seen, client = asyncio.run(play(url))
    assert [o.error for turn in seen for o in turn] == [""] * 24
    assert [o.messages[0].content for o in seen[1]] == ["a" * (i + 1) for i in range(6)]
    assert [o.reward for o in seen[-1]] == pytest.approx([0.1 * (i + 3) for i in range(6)])
    assert client.most_sessions == sessions


def test_echo_is_played_to_its_last_turn(echo: str) -> None:
    keys = {"action_key": "message", "observation": "echoed_message", "returns": "sum"}
    seen = walk(echo, ["hi", "hello"], turns=2, **keys)
    assert [o.messages for o in seen] == [
        (AgentMessage("user", "echo environment ready!"),), (AgentMessage("tool", "hi"),),
        (AgentMessage("tool", "hello"),),
    ]  # fmt: skip
    assert [o.done for o in seen] == [False, False, True]
    assert seen[-1].reward == pytest.approx(0.7)
    (last,) = walk(echo, ["hi", "hello"], turns=2, **{**keys, "returns": "last"})[2:]
    assert last.reward == pytest.approx(0.5)


def test_a_check_tells_of_a_server_with_fewer_sessions_than_tasks() -> None:
    for sessions, told in ((1, ["its server takes 1 session at once"]), (2, [])):
        with served(Columns, ColumnAction, ColumnObservation, sessions) as url:
            spec = EnvironmentSpec(kind="openenv", url=url, action_key="column")
            check = asyncio.run(check_environment(spec, CheckPlan(tasks=2, script=("1",))))
        assert [f.what for f in check.findings if "session" in f.what] == told
        assert [e.error for e in check.episodes] == [""] * 4


def test_a_text_may_be_a_number_and_another_text_is_a_failed_turn() -> None:
    with served(Columns, ColumnAction, ColumnObservation, sessions=1) as url:
        _, unread, played = walk(url, ["left", " 3\n"], action_key="column")
    assert unread.error_kind == "bad_action"
    assert not unread.done
    assert unread.messages[0].content.startswith("bad action: column: Input should be a valid int")
    assert (played.messages[0].content, played.reward) == ("column 3", 1.0)


def test_a_template_shows_several_fields(echo: str) -> None:
    template = "{echoed_message} ({message_length})"
    (_, seen) = walk(echo, ["hi"], action_key="message", observation=template)
    assert seen.messages[0].content == "hi (2)"


@pytest.mark.parametrize("shown", ["text", "{text}!"])
def test_a_field_that_is_not_there_is_named(echo: str, shown: str) -> None:
    (seen,) = walk(echo, [], action_key="message", observation=shown)
    assert seen.error.startswith("environment_refused: its observation has no ")
    assert "echoed_message" in seen.error
    assert seen.error.endswith("correct the environment's key observation")


def test_an_action_key_that_the_server_lacks_is_told_before_any_episode(
    echo: str, grid: str, calculator: str
) -> None:
    for url, error in (
        (echo, "has no field text: its fields are message; set action_key to its text field"),
        (grid, "has no field text: its fields are column, row; set action_key"),
        (calculator, "its fields are arguments, tool_name, type; set action: tool"),
    ):
        with pytest.raises(DataError) as raised:
            walk(url, [])
        assert error in str(raised.value)


def test_an_action_that_needs_more_fields_than_the_text() -> None:
    schema = {"properties": {"row": {}, "column": {}}, "required": ["row", "column"]}
    spec = EnvironmentSpec(kind="openenv", url="http://127.0.0.1:1", action_key="row")
    with pytest.raises(DataError, match="needs more: its fields are column, row"):
        check_action(spec, schema)
    check_action(spec.model_copy(update={"action": "json"}), schema)
    assert action_schema("http://127.0.0.1:1") is None


def test_json_actions_and_the_reward_of_a_rubric(grid: str) -> None:
    """A text without an object, and an object that does not fit the schema, are the student's
    failures: the episode goes on and the server's step is not used up."""
    actions = ["up", 'I go {"row": 5}', '{"row": 5, "column": 1}', 'so {"row": 3, "column": 0}']
    opening, no_object, unfit, first, last = walk(
        grid, actions, action="json", observation="{board} {left}"
    )
    assert opening.messages[0].content == ".. 2"
    assert no_object.error_kind == unfit.error_kind == "bad_action"
    assert no_object.messages[0].content.startswith("no JSON object in this text")
    assert unfit.messages[0].content == "bad action: column: Field required."
    assert (first.messages[0].content, first.done, first.reward) == ("x 1", False, None)
    assert (last.done, last.reward) == (True, 0.8)


def test_mcp_tools_are_listed_and_called(calculator: str) -> None:
    actions = [
        "what?", '{"tool": "divide", "arguments": {}}',
        '{"tool": "calculate", "arguments": {"expression": "12 * 11"}}',
        '<tool_call>{"name": "submit", "arguments": {"answer": "1"}}</tool_call>',
    ]  # fmt: skip
    opening, text, unknown, called, end = walk(calculator, actions, action="tool")
    assert [t.name for t in opening.tools] == ["calculate", "submit"]
    assert opening.tools[0].parameters["properties"]["expression"]["type"] == "string"
    assert opening.messages[0].content.startswith("what is ")
    assert text.error_kind == "bad_action"
    assert unknown.error_kind
    assert "divide" in unknown.messages[0].content
    assert called == Observation((AgentMessage("tool", "132"),))
    assert (end.done, end.reward) == (True, 0.0)
    a, _, b = opening.messages[0].content.removeprefix("what is ").removesuffix("?").split()
    right = f'{{"tool": "submit", "arguments": {{"answer": "{int(a) * int(b)}"}}}}'
    assert walk(calculator, [right], action="tool")[-1].reward == 1.0


def test_a_server_s_failures_are_the_episode_s_error(echo: str) -> None:
    keys = {"action_key": "message", "observation": "echoed_message"}
    (_, raised) = walk(echo, ["raise"], **keys)
    assert raised.error == "environment_refused: no such message (EXECUTION_ERROR)"
    (_, slow) = walk(echo, ["wait"], timeout_s=0.5, **keys)
    assert slow.error == "environment_died: no answer within 0.5 s"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    (dead,) = walk(f"http://127.0.0.1:{port}", [], **keys)
    assert dead.error.startswith("environment_died: ConnectionRefusedError")
