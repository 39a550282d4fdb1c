"""The desk as a process of its own, and the thread that stops."""

import asyncio
import socket
import subprocess
import sys
import threading
from pathlib import Path

from desk_tasks import a_task, expected_after, solution

from cartridge_forge.plugins.episodes.environments.openenv.client import OpenEnvClient
from cartridge_forge.plugins.episodes.environments.openenv.server import LocalEnvironment
from cartridge_forge.plugins.episodes.spec.environment import EnvironmentSpec
from cartridge_forge.protocols.episodes import EnvironmentRequest

TASK = a_task()


def test_a_server_that_is_killed_mid_episode_and_comes_back_is_played_again(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def serve() -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "cartridge_forge.plugins.episodes.environments.openenv.server",
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

    server = LocalEnvironment()
    with server:
        asyncio.run(play())
    assert "local environment" not in {thread.name for thread in threading.enumerate()}
