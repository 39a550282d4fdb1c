"""Open the environment that a spec describes, and play several by the names of their tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from cartridge_forge.plugins.chat.episodes import EnvironmentRequest, Observation
from cartridge_forge.plugins.environments.sessions import EpisodeEnvironment, failed
from cartridge_forge.plugins.environments.spec import EnvironmentSpec


def environment_of(spec: EnvironmentSpec, most_turns: int) -> EpisodeEnvironment:
    """Return the environment of a spec, before `start`. `most_turns` is when its episodes end."""
    if spec.kind == "verifiers":
        from cartridge_forge.plugins.environments.verifiers.stepped import (
            TasksetEnvironment,
        )

        return TasksetEnvironment(spec, most_turns)
    if spec.kind == "python":
        from cartridge_forge.plugins.environments.python.client import PythonEnvironment

        return PythonEnvironment(spec, most_turns)
    from cartridge_forge.plugins.environments.openenv.client import OpenEnvClient

    return ServedDesk(spec, most_turns) if spec.url is None else OpenEnvClient(spec, most_turns)


class ServedDesk:
    """Play the clinic desk on a server of this process's own, on loopback."""

    def __init__(self, spec: EnvironmentSpec, most_turns: int) -> None:
        self._spec, self._most_turns = spec, most_turns
        self._server = ExitStack()
        self._client: EpisodeEnvironment | None = None

    async def start(self) -> None:
        from cartridge_forge.plugins.environments.openenv.client import OpenEnvClient

        url = await asyncio.to_thread(self._serve)
        served = self._spec.model_copy(update={"kind": "openenv", "url": url})
        self._client = OpenEnvClient(served, self._most_turns)

    async def move(self, move: EnvironmentRequest) -> Observation:
        assert self._client is not None, "start first"
        return await self._client.move(move)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        await asyncio.to_thread(self._server.close)

    def _serve(self) -> str:
        from cartridge_forge.plugins.environments.openenv.server import (
            LocalEnvironment,  # OpenEnv takes a second to import
        )

        return self._server.enter_context(LocalEnvironment()).url


class SeveralEnvironments:
    """Play the environments of a run, each task in the one that it names. At most `at_once` moves
    are under way; a move that waits for others is not late by that."""

    def __init__(self, specs: Sequence[EnvironmentSpec], most_turns: int, at_once: int) -> None:
        self._room = asyncio.Semaphore(at_once)
        self._of: Mapping[str, EpisodeEnvironment] = {
            spec.id: environment_of(spec, most_turns) for spec in specs
        }

    async def start(self) -> None:
        for environment in self._of.values():
            await environment.start()

    async def move(self, move: EnvironmentRequest) -> Observation:
        name = move.task.environment
        environment = self._of.get(name) or (next(iter(self._of.values())) if not name else None)
        if environment is None:
            names = ", ".join(self._of)
            return failed("environment_refused", f"no environment {name} is played, but {names}")
        async with self._room:
            return await environment.move(move)

    async def close(self) -> None:
        for environment in self._of.values():
            await environment.close()
