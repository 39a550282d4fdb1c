"""The desk as a process of its own, and the thread that stops."""

import asyncio
import threading

from desk_tasks import a_task

from environments.openenv.client import OpenEnvClient
from environments.openenv.server import LocalEnvironment
from protocols.episodes import EnvironmentRequest
from protocols.spec.environment import EnvironmentSpec

TASK = a_task()


def test_the_thread_ends_though_sessions_are_open() -> None:
    async def play() -> None:
        client = OpenEnvClient(EnvironmentSpec(kind="openenv", url=server.url), most_turns=64)
        await client.move(EnvironmentRequest(TASK))
        await asyncio.to_thread(server.__exit__, None, None, None)
        await client.close()

    server = LocalEnvironment()
    with server:
        asyncio.run(play())
    assert "local environment" not in {thread.name for thread in threading.enumerate()}
