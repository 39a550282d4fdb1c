"""Run the rewards of a spec in worker processes, one for each reward.

    RewardWorkers.outcomes(views) -> by episode: {name: RewardOutcome}

A worker has limits of time and memory, and no secret. One that breaks a limit is replaced, and the
episodes of its call are judged again one by one, so that only the episode at fault has the error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cartridge_forge.plugins.chat.episodes import RewardOutcome
from cartridge_forge.plugins.environments.rewards.calling import GRACE_S
from cartridge_forge.plugins.environments.spec import RewardSpec
from cartridge_forge.plugins.host.limited_process import (
    BrokenLimitError,
    LimitedProcess,
    ProcessLimits,
)
from cartridge_forge.protocols.errors import DataError, RunError

OPEN_S = 120.0  # to import the module, which may import torch
LATE_S = 3.0  # after which a worker that should have ended itself is killed
PROCESSOR_S = 24 * 3600.0  # the limits are by the clock
FILE_BYTES = 64 * 1024**2  # of a file that a function writes

EpisodeView = Mapping[str, Any]  # what a reward is told of an episode: `combining.view_of`


class RewardWorker:
    """Compute one reward in a process of its own, which starts at the first call."""

    def __init__(self, spec: RewardSpec) -> None:
        self._spec, self._plain = spec, spec.model_dump(mode="json")
        paths = [spec.folder] if spec.python is not None else []
        limits = ProcessLimits(
            PROCESSOR_S, OPEN_S, memory=spec.memory_mib * 2**20, file_bytes=FILE_BYTES
        )
        self._process = LimitedProcess(
            "cartridge_forge.plugins.environments.rewards.calling:run", limits, paths=paths
        )
        self._open = False

    def require(self, columns: Sequence[str] | None = None) -> None:
        """Import the function. Raises DataError where it cannot be used, or asks for what is none
        of these columns of the rows."""
        try:
            self._process.call({"reward": self._plain, "columns": columns})
        except BrokenLimitError as broken:
            why = f"takes over {OPEN_S:g} s" if broken.late else f"ends with {broken.status}"
            raise DataError(
                f"{self._spec.python or self._spec.verifier}: its import {why}"
            ) from None
        self._open = True

    def outcomes(self, views: Sequence[EpisodeView], budget: float) -> list[RewardOutcome]:
        """Return the outcome of each episode, in order, within `budget` seconds or a little more.
        Those that were not reached have failed. Blocks."""
        stop = time.monotonic() + budget
        if budget <= 0:
            return [self._alone(view, stop) for view in views]
        outcomes = self._judged(views, budget)
        if outcomes is not None:
            return outcomes
        return [self._alone(view, stop) for view in views]

    def end(self) -> None:
        self._process.end()

    def _judged(self, views: Sequence[EpisodeView], budget: float) -> list[RewardOutcome] | None:
        """Return the outcomes, or None where several broke a limit together."""
        seconds = self._spec.timeout_s
        request = {
            "reward": self._plain, "episodes": views, "seconds": seconds, "budget": budget,
        }  # fmt: skip
        start = time.monotonic()
        try:
            if not self._open:
                self.require()
            start = time.monotonic()
            patience = min(len(views) * (seconds + GRACE_S), budget + seconds + GRACE_S) + LATE_S
            outcomes = self._process.call(request, wall_s=patience)
        except BrokenLimitError as broken:
            self._open = False
            if len(views) > 1:
                return None
            late = broken.late or time.monotonic() - start > seconds
            why = f"its process ended with {broken.status}"
            return [_failed(f"took longer than {seconds:g} s" if late else why)]
        except (DataError, RunError) as error:
            return [_failed(str(error))] * len(views)
        if any(outcome.get("worn") for outcome in outcomes):  # what it holds may stay held
            self.end()
            self._open = False
        return [_outcome(outcome) for outcome in outcomes]

    def _alone(self, view: EpisodeView, stop: float) -> RewardOutcome:
        remaining = stop - time.monotonic()
        if remaining <= 0:
            return _failed("not called: the rewards before it took all of the step's time")
        outcomes = self._judged([view], remaining)
        assert outcomes is not None
        return outcomes[0]


class RewardWorkers:
    """Hold a worker for each reward of a spec."""

    def __init__(self, rewards: Sequence[RewardSpec]) -> None:
        self._workers = {r.title: RewardWorker(r) for r in rewards if r.of_worker}
        self._turns = {name: asyncio.Lock() for name in self._workers}

    async def start(self) -> None:
        """Import every function. Raises DataError for one that cannot be used."""
        await asyncio.gather(*(asyncio.to_thread(w.require) for w in self._workers.values()))

    async def outcomes(
        self, views: Sequence[EpisodeView], budget: float
    ) -> list[dict[str, RewardOutcome]]:
        """Return what each reward gives each episode, by name, within `budget` seconds, the time
        included for which other episodes hold a worker."""
        stop = time.monotonic() + budget

        async def column(name: str, worker: RewardWorker) -> list[RewardOutcome]:
            async with self._turns[name]:
                remaining = stop - time.monotonic()
                return await asyncio.to_thread(worker.outcomes, views, remaining)

        columns = await asyncio.gather(*(column(*named) for named in self._workers.items()))
        return [
            {name: column[i] for name, column in zip(self._workers, columns, strict=True)}
            for i in range(len(views))
        ]

    def end(self) -> None:
        for worker in self._workers.values():
            worker.end()


def _failed(why: str) -> RewardOutcome:
    return RewardOutcome(None, why, failed=True)


def _outcome(reply: Mapping[str, Any]) -> RewardOutcome:
    if "value" in reply:
        return RewardOutcome(reply["value"])
    failed = "error" in reply
    return RewardOutcome(None, reply["error" if failed else "none"], failed)
