"""Step the environments of a run for many episodes at a time."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

from monarch.actor import Actor, concurrent_endpoint

from cartridge_forge.plugins.chat.episodes import EnvironmentReply, EnvironmentRequest
from cartridge_forge.plugins.environments.opening import SeveralEnvironments
from cartridge_forge.plugins.environments.spec import EnvironmentSpec


class EnvironmentActor(Actor):
    """Run one of K replicas of the same environments. Every request brings all actions of its
    episode, so any replica can continue any episode.

    `service.spawn(EnvironmentActor, n=2, args=(specs, most_turns))`. With kind desk each serves its
    own desk on loopback; of kinds python and verifiers each has processes of its own. `at_once`
    bounds the moves that a replica has under way, so that a burst of episodes, as of an evaluation,
    makes no server late.
    """

    def __init__(
        self, specs: Sequence[EnvironmentSpec], most_turns: int, at_once: int = 64
    ) -> None:
        self._specs, self._most_turns, self._at_once = specs, most_turns, at_once
        self._environments: SeveralEnvironments | None = None

    @concurrent_endpoint
    async def ready(self) -> int:
        """Return this process's id. Raises RunError where its own server cannot start, and
        DataError where an environment could play no episode."""
        if self._environments is None:
            environments = SeveralEnvironments(self._specs, self._most_turns, self._at_once)
            try:
                await environments.start()
            except BaseException:
                await environments.close()
                raise
            self._environments = environments
        return os.getpid()

    @concurrent_endpoint
    async def move(self, moves: Sequence[EnvironmentRequest]) -> EnvironmentReply:
        """Return the environment's observation for each request, in their order, within the spec's
        `timeout_s`; a failure is reported in `error`."""
        assert self._environments is not None, "the service asks `ready` first"
        start = time.perf_counter()
        observations = await asyncio.gather(*map(self._environments.move, moves))
        return EnvironmentReply(time.perf_counter() - start, tuple(observations))

    async def __cleanup__(self, _: Exception | None) -> None:
        if self._environments is not None:
            await self._environments.close()
