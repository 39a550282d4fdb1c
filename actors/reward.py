"""Judge finished episodes by functions and verifiers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

from monarch.actor import Actor, concurrent_endpoint

from cartridge_forge.plugins.chat.episodes import RewardReply
from cartridge_forge.plugins.environments.rewards.workers import EpisodeView, RewardWorkers
from cartridge_forge.plugins.environments.spec import RewardSpec

SHARE = 0.6  # of a call's time, for the rewards themselves


class RewardActor(Actor):
    """Run one of K replicas, each with a worker process for every reward.

    `service.spawn(RewardActor, n=2, args=(spec.reward, call_timeout_s))`
    """

    def __init__(self, rewards: Sequence[RewardSpec], call_timeout_s: float) -> None:
        self._rewards, self._budget = rewards, SHARE * call_timeout_s
        self._workers: RewardWorkers | None = None

    @concurrent_endpoint
    async def ready(self) -> int:
        """Return this process's id. Raises DataError for a function that cannot be used."""
        if self._workers is None:
            workers = RewardWorkers(self._rewards)
            try:
                await workers.start()
            except BaseException:
                workers.end()
                raise
            self._workers = workers
        return os.getpid()

    @concurrent_endpoint
    async def outcomes(self, views: Sequence[EpisodeView]) -> RewardReply:
        """Return what each reward gives each episode, by name, in order."""
        assert self._workers is not None, "the service asks `ready` first"
        start = time.perf_counter()
        outcomes = await self._workers.outcomes(views, self._budget)
        return RewardReply(time.perf_counter() - start, tuple(outcomes))

    async def __cleanup__(self, _: Exception | None) -> None:
        if self._workers is not None:
            await asyncio.to_thread(self._workers.end)
