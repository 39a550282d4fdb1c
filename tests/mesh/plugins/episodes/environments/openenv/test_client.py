"""Episodes over /ws: OpenEnv's own server, sessions that are lost, and servers that die or err."""

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from desk_tasks import a_task, expected_after, solution
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, State
from openenv.core.env_server.types import Observation as ServedObservation
from openenv.core.generic_client import GenericEnvClient
from websockets.asyncio.server import ServerConnection, serve

from cartridge_forge.plugins.episodes.environments import sessions
from cartridge_forge.plugins.episodes.environments.openenv.client import OpenEnvClient
from cartridge_forge.plugins.episodes.environments.openenv.server import LocalEnvironment
from cartridge_forge.plugins.episodes.spec.environment import EnvironmentSpec
from cartridge_forge.plugins.replay.fake_provider.server import LoopbackServer
from cartridge_forge.protocols.episodes import EnvironmentRequest, Observation, Task
from cartridge_forge.protocols.teacher_replay import AgentMessage

TASK = a_task()
STRAY = ("find sodium in nowhere.", "sing.", *solution(TASK))


@pytest.fixture(scope="module")
def server() -> Iterator[LocalEnvironment]:
    with LocalEnvironment() as running:
        yield running


def a_client(url: str, timeout_s: float = 30.0, action_key: str = "text") -> OpenEnvClient:
    spec = EnvironmentSpec(kind="openenv", url=url, timeout_s=timeout_s, action_key=action_key)
    return OpenEnvClient(spec, most_turns=64)


@asynccontextmanager
async def client_of(
    url: str, timeout_s: float = 30.0, action_key: str = "text"
) -> AsyncIterator[OpenEnvClient]:
    client = a_client(url, timeout_s, action_key)
    try:
        yield client
    finally:
        await client.close()


async def walk(client: OpenEnvClient, task: Task, actions: tuple[str, ...]) -> list[Observation]:
    """What the client sees after 0, 1, .. of the actions."""
    return [
        await client.move(EnvironmentRequest(task, actions[:n])) for n in range(len(actions) + 1)
    ]


def wanted(task: Task, actions: tuple[str, ...]) -> list[Observation]:
    return [expected_after(task, actions[:n]) for n in range(len(actions) + 1)]


def test_an_episode_says_what_the_desk_says(server: LocalEnvironment) -> None:
    async def play() -> list[Observation]:
        async with client_of(server.url) as client:
            seen = await walk(client, TASK, STRAY)
            assert not client._waiting  # the session ended with the episode
            return seen

    seen = asyncio.run(play())
    assert seen == wanted(TASK, STRAY)
    assert (seen[-1].reward, seen[-1].error) == (1.0, "")


def test_openenv_s_own_client_is_served_too(server: LocalEnvironment) -> None:
    with GenericEnvClient(base_url=server.url).sync() as env:
        env.reset(**TASK.arguments, replay_actions=list(STRAY[:2]))
        result = env.step({"text": STRAY[2]})
        state = env.state()
    (message,) = expected_after(TASK, STRAY[:3]).messages
    assert result.observation["messages"] == [{"role": "tool", "content": message.content}]
    assert state["actions"] == list(STRAY[:3])
    assert len(state["history"]) == 7


def test_32_episodes_at_a_time_do_not_mix(server: LocalEnvironment) -> None:
    """Four of each task: they share sessions where they stand alike."""
    tasks = [a_task(seed) for seed in range(8) for _ in range(4)]
    strays = [tuple(f"read note {n}." for n in range(i % 5)) for i in range(len(tasks))]
    actions = [(*stray, *solution(task)) for stray, task in zip(strays, tasks, strict=True)]

    async def play() -> list[list[Observation]]:
        async with client_of(server.url) as client:
            walks = (walk(client, t, a) for t, a in zip(tasks, actions, strict=True))
            return await asyncio.gather(*walks)

    assert asyncio.run(play()) == [wanted(t, a) for t, a in zip(tasks, actions, strict=True)]


def test_a_lost_connection_does_not_end_the_episode(server: LocalEnvironment) -> None:
    async def play() -> list[Observation]:
        seen = []
        async with client_of(server.url) as client:
            for n in range(len(STRAY) + 1):
                seen.append(await client.move(EnvironmentRequest(TASK, STRAY[:n])))
                for session in itertools.chain(*client._waiting.values()):
                    session.handle.transport.abort()
        return seen

    assert asyncio.run(play()) == wanted(TASK, STRAY)


def test_another_client_goes_on_with_the_episode(server: LocalEnvironment) -> None:
    async def play() -> Observation:
        async with client_of(server.url) as first, client_of(server.url) as second:
            await walk(first, TASK, STRAY[:2])
            return await second.move(EnvironmentRequest(TASK, STRAY[:4]))

    assert asyncio.run(play()) == expected_after(TASK, STRAY[:4])


def test_sessions_that_wait_are_bounded(
    server: LocalEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_WAITING", 2)
    tasks = [a_task(seed) for seed in range(5)]

    async def play() -> list[Observation]:
        async with client_of(server.url) as client:
            for task in tasks:
                await client.move(EnvironmentRequest(task))
            assert len(client._waiting) == 2
            return [await client.move(EnvironmentRequest(t, solution(t)[:1])) for t in tasks]

    assert asyncio.run(play()) == [expected_after(t, solution(t)[:1]) for t in tasks]


def test_what_the_environment_refuses_is_its_own_error(server: LocalEnvironment) -> None:
    task = Task("x", "x", dict(TASK.arguments) | {"fields": 0})
    seen = asyncio.run(a_client(server.url).move(EnvironmentRequest(task)))
    assert seen.done
    assert seen.reward is None
    assert seen.error.startswith("environment_refused: a handbook has 1 to")


def test_a_server_that_is_gone_is_an_observation() -> None:
    async def play() -> tuple[Observation, Observation]:
        server = LocalEnvironment()
        await asyncio.to_thread(server.__enter__)
        async with client_of(server.url, timeout_s=10.0) as client:
            await client.move(EnvironmentRequest(TASK))
            await asyncio.to_thread(server.__exit__, None, None, None)
            return await client.move(EnvironmentRequest(TASK, STRAY[:1])), await client.move(
                EnvironmentRequest(TASK)
            )

    for seen in asyncio.run(play()):
        assert seen.done
        assert seen.error.startswith("environment_died: ")


def test_a_silent_server_is_waited_for_no_longer_than_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        client = a_client(f"http://127.0.0.1:{deaf.getsockname()[1]}", timeout_s=0.3)
        seen = asyncio.run(client.move(EnvironmentRequest(TASK)))
    assert seen.error == "environment_died: no answer within 0.3 s"


def test_an_environment_that_does_not_repeat_itself_is_found_out() -> None:
    said = iter(range(100))

    async def answer(connection: ServerConnection) -> None:
        async for _ in connection:
            text = {"observation": {"text": f"said {next(said)}"}, "done": False, "reward": None}
            await connection.send(json.dumps({"type": "observation", "data": text}))

    async def play() -> list[Observation]:
        async with serve(answer, "127.0.0.1", 0) as running:
            port = next(iter(running.sockets)).getsockname()[1]
            async with client_of(f"http://127.0.0.1:{port}") as client:
                seen = await walk(client, TASK, STRAY[:1])
                for session in itertools.chain(*client._waiting.values()):
                    session.handle.transport.abort()
                return [*seen, await client.move(EnvironmentRequest(TASK, STRAY[:2]))]

    opening, first, again = asyncio.run(play())
    assert (opening.messages, first.messages) == (
        (AgentMessage("user", "said 0"),), (AgentMessage("tool", "said 1"),),
    )  # fmt: skip
    assert again.done
    assert again.error.startswith("environment_diverged: after 0 actions")


@pytest.mark.parametrize("body", ["no json", "[1]", '{"type": "observation"}'])
def test_words_that_are_no_reply_end_the_episode(body: str) -> None:
    async def answer(connection: ServerConnection) -> None:
        async for _ in connection:
            await connection.send(body)

    async def play() -> Observation:
        async with serve(answer, "127.0.0.1", 0) as running:
            port = next(iter(running.sockets)).getsockname()[1]
            return await a_client(f"http://127.0.0.1:{port}", 10.0).move(EnvironmentRequest(TASK))

    assert asyncio.run(play()).error.startswith("environment_died: ")


class Guess(Action):
    word: str


class Heard(ServedObservation):
    echoed: str
    remaining: int


class Echo(Environment[Guess, Heard, State]):
    """Somebody else's: its own names for everything, one reward on the way and one at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._left = 0

    def reset(  # type: ignore[override]
        self, seed: int | None = None, episode_id: str | None = None, tries: int = 1
    ) -> Heard:
        self._left = tries
        return Heard(echoed=f"{tries} tries", remaining=tries)

    def step(self, action: Guess, timeout_s: float | None = None) -> Heard:  # type: ignore[override]
        self._left -= 1
        return Heard(
            echoed=action.word.upper(), remaining=self._left, done=not self._left, reward=0.5
        )

    @property
    def state(self) -> State:
        return State()


def test_a_foreign_environment_is_understood() -> None:
    server = LoopbackServer(create_fastapi_app(Echo, Guess, Heard), "echo", ws="websockets-sansio")
    task = Task("t", "", {"tries": 2, "unknown": 1})

    async def play() -> list[Observation]:
        async with client_of(server.url, action_key="word") as client:
            return await walk(client, task, ("ab", "c"))

    with server:
        seen = asyncio.run(play())
    assert seen == [
        Observation((AgentMessage("user", "2 tries"),)),
        Observation((AgentMessage("tool", "AB"),)),
        Observation((AgentMessage("tool", "C"),), done=True, reward=0.5),
    ]
