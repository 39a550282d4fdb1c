"""Step the environment for many episodes at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import ExitStack

from monarch.actor import Actor, concurrent_endpoint

from environments.openenv.client import OpenEnvClient
from protocols.episodes import EnvironmentRequest, Observation
from protocols.spec.environment import EnvironmentSpec


class EnvironmentActor(Actor):
    """Run one of K replicas of the same environment. Every request brings all actions of its
    episode, so any replica can continue any episode.

    `service.spawn(EnvironmentActor, n=2, args=(spec,))`. With kind desk each serves its own desk on
    loopback.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec
        self._server = ExitStack()
        self._client: OpenEnvClient | None = None

    @concurrent_endpoint
    async def ready(self) -> int:
        """Return this process's id. Raises RunError where its own server cannot start."""
        if self._client is None:
            url = self._spec.url
            if url is None:
                url = await asyncio.to_thread(self._serve)
            self._client = OpenEnvClient(url, self._spec.timeout_s, self._spec.action_key)
        return os.getpid()

    @concurrent_endpoint
    async def move(self, moves: Sequence[EnvironmentRequest]) -> list[Observation]:
        """Return the environment's observation for each request, in their order, within the spec's
        `timeout_s`; a failure is reported in `error`."""
        assert self._client is not None, "the service asks `ready` first"
        return list(await asyncio.gather(*(self._client.move(move) for move in moves)))

    async def __cleanup__(self, _: Exception | None) -> None:
        if self._client is not None:
            await self._client.close()
        await asyncio.to_thread(self._server.close)

    def _serve(self) -> str:
        from environments.openenv.server import LocalEnvironment  # OpenEnv takes a second to import

        return self._server.enter_context(LocalEnvironment()).url
