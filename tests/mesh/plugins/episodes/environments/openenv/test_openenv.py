"""Test OpenEnv: its client, its server, and the desk as an environment."""

import asyncio
import itertools
import json
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from episode_setup import a_task, expected_after, its_case, solution
from hypothesis import given
from hypothesis import strategies as st
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, State
from openenv.core.env_server.types import Observation as ServedObservation
from openenv.core.generic_client import GenericEnvClient
from websockets.asyncio.server import ServerConnection, serve

from cartridge_forge.plugins.chat.episodes import EnvironmentRequest, Observation, Task
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.clinic.desk import MAX_CALL_CHARS, bounded
from cartridge_forge.plugins.environments import sessions
from cartridge_forge.plugins.environments.openenv.client import OpenEnvClient
from cartridge_forge.plugins.environments.openenv.desk_env import (
    DeskAction,
    DeskEnvironment,
    DeskObservation,
    DeskState,
)
from cartridge_forge.plugins.environments.openenv.server import LocalEnvironment
from cartridge_forge.plugins.environments.spec import EnvironmentSpec
from cartridge_forge.plugins.replay.fake_provider.server import LoopbackServer
from cartridge_forge.protocols.errors import DataError, RunError

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


def test_a_server_that_is_killed_mid_episode_and_comes_back_is_played_again(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def serve() -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "cartridge_forge.plugins.environments.openenv.server",
            "--port",
            str(port),
        ]
        with (tmp_path / "log").open("ab") as log:
            return subprocess.Popen(command, stderr=log)

    async def until_up(client: OpenEnvClient) -> None:
        for _ in range(600):
            if not (await client.move(EnvironmentRequest(TASK))).error:
                return
            await asyncio.sleep(0.1)
        raise AssertionError("the server did not come up in a minute")

    async def play() -> None:
        client = OpenEnvClient(
            EnvironmentSpec(kind="openenv", url=f"http://127.0.0.1:{port}", timeout_s=10.0),
            most_turns=64,
        )
        process = serve()
        try:
            await until_up(client)
            actions = solution(TASK)
            assert await client.move(EnvironmentRequest(TASK, actions[:1])) == expected_after(
                TASK, actions[:1]
            )
            process.kill()
            process.wait()
            died = await client.move(EnvironmentRequest(TASK, actions[:2]))
            assert died.error.startswith("environment_died: ")
            process = serve()
            await until_up(client)
            assert await client.move(EnvironmentRequest(TASK, actions)) == expected_after(
                TASK, actions
            )
            await client.close()
        finally:
            process.kill()
            process.wait()

    asyncio.run(play())


def test_the_thread_ends_though_sessions_are_open() -> None:
    async def play() -> None:
        client = OpenEnvClient(EnvironmentSpec(kind="openenv", url=server.url), most_turns=64)
        await client.move(EnvironmentRequest(TASK))
        await asyncio.to_thread(server.__exit__, None, None, None)
        await client.close()

    others, server = threading.enumerate(), LocalEnvironment()
    with server:
        asyncio.run(play())
    started = [thread for thread in threading.enumerate() if thread not in others]
    assert "local environment" not in {thread.name for thread in started}


DESK_TASK = a_task(max_turns=6)
CASE = its_case(DESK_TASK)
CALLS = st.one_of(
    st.sampled_from(
        [
            *solution(DESK_TASK)[:2],
            "find sodium in nowhere.",
            "read note 1.",
            "answer.",
            "sing.",
            "read",
        ]
    ),
    st.text(max_size=30),
    st.sampled_from(["find ", "read note 1 ", "x"]).map(lambda start: start * 200),
)


def play(actions: list[str]) -> tuple[DeskEnvironment, list[DeskObservation], list[DeskState]]:
    """Until it is done: the environment, and what was seen and the state after 0, 1, .. actions."""
    env = DeskEnvironment()
    seen, states = [env.reset(**DESK_TASK.arguments)], [env.state]
    for action in actions:
        if seen[-1].done:
            break
        seen.append(env.step(DeskAction(text=action)))
        states.append(env.state)
    return env, seen, states


def test_a_case_is_solved_and_judged() -> None:
    _, seen, states = play(list(solution(DESK_TASK)))
    assert [o.messages[0]["content"] for o in seen] == [
        f"what is the {CASE.field}?", f"note {CASE.note}.", f"{CASE.field} {CASE.value}.", "right.",
    ]  # fmt: skip
    assert [(o.done, o.reward) for o in seen] == [(False, None)] * 3 + [(True, 1.0)]
    assert ["expected" in o.metadata for o in seen] == [False, False, False, True]
    assert seen[-1].metadata["expected"] == CASE.value
    assert [tool["name"] for tool in seen[0].tools] == ["find", "read", "answer"]
    assert [m["role"] for m in states[-1].history] == ["user"] + ["assistant", "tool"] * 3
    assert states[-1].step_count == 3


@pytest.mark.parametrize(
    ("call", "kind", "hint"),
    [
        (f"find {CASE.field} in nowhere.", "missing_record", "where"),
        ("sing.", "unknown_tool", "tools"),
        ("read 12", "bad_arguments", "form_of_read"),
        (f"answer {'x' * MAX_CALL_CHARS}", "bad_arguments", "form_of_answer"),
        ("y" * 10_000, "unknown_tool", "tools"),
    ],
)
def test_a_failed_call_is_marked(call: str, kind: str, hint: str) -> None:
    _, seen, _ = play([call])
    marks = seen[-1].metadata
    assert (marks["error_kind"], marks["hint_template_key"]) == (kind, hint)
    assert CASE.value not in str(marks)
    assert not seen[-1].done


def test_a_call_is_bounded_where_it_says() -> None:
    longest = "answer " + "x" * (MAX_CALL_CHARS - 7)
    assert bounded(longest) == longest
    assert bounded(longest + "x") == "answer"
    assert bounded(" " * 500) == ""


@given(st.lists(CALLS, max_size=8))
def test_playing_again_gives_what_was_seen_at_every_turn(actions: list[str]) -> None:
    env, seen, states = play(actions)
    for turn, (observation, state) in enumerate(zip(seen, states, strict=True)):
        again = DeskEnvironment()
        assert again.reset(**DESK_TASK.arguments, replay_actions=actions[:turn]) == observation
        assert again.state == state
    assert env.state == states[-1]


def test_the_turns_are_counted() -> None:
    _, seen, _ = play(["sing."] * 10)
    assert len(seen) == 7
    assert (seen[-1].done, seen[-1].reward) == (True, 0.0)


def test_an_episode_that_is_not_open_is_refused() -> None:
    with pytest.raises(RunError, match="reset first"):
        DeskEnvironment().step(DeskAction(text="sing."))
    env, _, _ = play(list(solution(DESK_TASK)))
    with pytest.raises(RunError, match="reset first"):
        env.step(DeskAction(text="sing."))


@pytest.mark.parametrize("wrong", [{"max_turns": 0}, {"fields": 0}])
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"must be >= 1|a handbook has"):
        DeskEnvironment().reset(**dict(DESK_TASK.arguments) | wrong)


def test_a_shift_begins_a_conversation_with_every_case() -> None:
    env = DeskEnvironment()
    env.reset(**{**DESK_TASK.arguments, "cases": 2, "max_turns": 7})
    seen = [env.step(DeskAction(text=text)) for text in [*solution(DESK_TASK), "answer nothing."]]
    assert [[m["role"] for m in o.messages] for o in seen] == [
        ["tool"], ["tool"], ["tool", "user"], ["tool"]
    ]  # fmt: skip
    assert [o.metadata.get("new_conversation") for o in seen] == [None, None, True, None]
    assert [(o.done, o.reward) for o in seen] == [(False, None)] * 3 + [(True, 0.0)]
    assert "expected" in seen[-1].metadata
    assert seen[-1].metadata["expected"] not in (CASE.value, "nothing")


def test_a_case_of_a_shift_has_its_share_of_the_turns() -> None:
    env = DeskEnvironment()
    env.reset(**{**DESK_TASK.arguments, "cases": 2, "max_turns": 7})
    seen = [env.step(DeskAction(text="sing.")) for _ in range(6)]
    assert [len(o.messages) for o in seen] == [1, 1, 2, 1, 1, 1]
    assert (seen[-1].done, seen[-1].reward) == (True, 0.0)
    assert "expected" not in seen[-1].metadata  # the first case had decided
    with pytest.raises(DataError, match="max_turns must be >= 2"):
        env.reset(**{**DESK_TASK.arguments, "cases": 2, "max_turns": 1})
