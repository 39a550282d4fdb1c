"""Play the tasks of a source, and judge their episodes.

Episodes are played in waves. A wave has one generator and one environment call a turn, and no wave
waits for another: while the environment answers one, a generator writes the turns of the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest

from cartridge_forge.plugins.chat.episodes import EnvironmentRequest, Episode, Observation, Task
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.environments.monitors import flagged
from cartridge_forge.plugins.environments.rollout import (
    Ended,
    Moving,
    resets,
    run_episodes,
)
from cartridge_forge.plugins.episodes.spec.learn import EpisodesLearn
from cartridge_forge.plugins.episodes.task_sources.base import TaskSource
from cartridge_forge.plugins.episodes.task_sources.rewards import EpisodeRewards
from cartridge_forge.protocols.step import PrefixRef, Sampling, stream_seed
from cartridge_forge.services.pool.pool import gather
from cartridge_forge.training.records import GenerateCall


class EpisodePlay:
    """Play tasks of `source` with a student that acts through `move`."""

    def __init__(
        self,
        spec: EpisodesLearn,
        source: TaskSource,
        conversation: ChatRenderer,
        move: Moving,
        rewards: EpisodeRewards,
    ) -> None:
        assert spec.episodes is not None
        self._spec, self._source = spec.episodes, source
        self._seed, self._turn_tokens = spec.train.seed, spec.rollout.max_tokens
        self._conversation, self._move, self._rewards = conversation, move, rewards
        self._opened: tuple[list[EnvironmentRequest], asyncio.Task[Sequence[Observation]]] | None
        self._opened = None

    def prepare(self, arm: str, step: int) -> None:
        """Ask the environment for the openings of a step's episodes beforehand: they depend on no
        policy. Only the newest step that was prepared is kept."""
        self._drop()
        requests = resets(self._tasks(arm, step, range(self._spec.tasks)), self._spec.group)
        self._opened = requests, asyncio.create_task(self._openings(requests))

    async def close(self) -> None:
        """Cancel what was prepared."""
        if (task := self._drop()) is not None:
            await asyncio.gather(task, return_exceptions=True)

    async def step(
        self,
        arm: str,
        step: int,
        numbers: Sequence[int],
        prefix: Callable[[Task], PrefixRef],
        generate: GenerateCall,
        ended: Ended | None = None,
        waves: int = 1,
    ) -> list[Episode]:
        """Return the episodes of a step's tasks with these numbers. Tasks do not depend on the
        arm."""
        tasks = self._tasks(arm, step, numbers)
        sampling = Sampling(max_tokens=self._turn_tokens)
        openings = None
        if self._opened is not None and self._opened[0] == resets(tasks, self._spec.group):
            (_, task), self._opened = self._opened, None
            openings = await task
        episodes = await self.play(
            tasks, self._spec.group, sampling, prefix, f"sample/{self._seed}/", generate, ended,
            waves, openings,
        )  # fmt: skip
        return [flagged(e, self._source.dialect) for e in episodes]

    async def play(
        self,
        tasks: Sequence[Task],
        group: int,
        sampling: Sampling,
        prefix: Callable[[Task], PrefixRef],
        stream: str,
        generate: GenerateCall,
        ended: Ended | None = None,
        waves: int = 1,
        openings: Sequence[Observation] | None = None,
    ) -> list[Episode]:
        """Return the episodes. Draws depend on `stream` and on the part of a request's name after
        the arm. Of n `waves`, wave i has every n-th episode from i on; what it asks depends on
        these alone."""

        parts = [slice(i, None, waves) for i in range(min(waves, group * len(tasks)))]
        played = await gather(
            run_episodes(
                tasks,
                partial(generate, whole=waves > 1),
                self._move,
                self._conversation,
                group_size=group,
                sampling=sampling,
                prefix=prefix,
                seed_of=lambda name: stream_seed(stream + name.partition("/")[2]),
                max_context=self._spec.max_context,
                max_turns=self._spec.max_turns,
                ended=ended,
                part=part,
                openings=None if openings is None else openings[part],
            )
            for part in parts
        )
        episodes = [e for row in zip_longest(*played) for e in row if e is not None]
        return await self._rewards.judge(episodes)

    def _tasks(self, arm: str, step: int, numbers: Sequence[int]) -> list[Task]:
        count, seed = self._spec.tasks, self._seed
        return [
            self._source.task(
                f"{arm}/{step + 1}/{i}", step * count + i, f"task/{seed}/{step}/{i}", held_out=False
            )
            for i in numbers
        ]

    async def _openings(self, requests: Sequence[EnvironmentRequest]) -> Sequence[Observation]:
        return await self._move(requests)

    def _drop(self) -> asyncio.Task[Sequence[Observation]] | None:
        if self._opened is None:
            return None
        (_, task), self._opened = self._opened, None
        task.cancel()
        return task


def in_groups(size: int, ended: Ended) -> Ended:
    """Return a function that awaits `ended` with each group of `size` episodes once all of them
    have ended, in the order of their names."""
    waiting: dict[str, list[Episode]] = {}

    async def grouped(episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            group = waiting.setdefault(episode.group, [])
            group.append(episode)
            if len(group) == size:
                await ended(sorted(waiting.pop(episode.group), key=lambda e: e.task.id))

    return grouped
