"""Play the tasks of a source, and judge their episodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from environments.monitors import flagged
from environments.renderer import ChatRenderer
from environments.rollout import Moving, run_episodes
from protocols.episodes import Episode, Task
from protocols.seeds import stream_seed
from protocols.spec.learn import LearnSpec
from protocols.types import Completion, GenerateRequest, PrefixRef, Sampling
from training.rollouts import TimedGenerate
from training.task_sources.base import TaskSource
from training.task_sources.rewards import EpisodeRewards


class EpisodePlay:
    """Play tasks of `source` with a student that acts through `move`."""

    def __init__(
        self,
        spec: LearnSpec,
        source: TaskSource,
        conversation: ChatRenderer,
        move: Moving,
        rewards: EpisodeRewards,
    ) -> None:
        assert spec.episodes is not None
        self._spec, self._source = spec.episodes, source
        self._seed, self._turn_tokens = spec.train.seed, spec.rollout.max_tokens
        self._conversation, self._move, self._rewards = conversation, move, rewards

    async def step(
        self,
        arm: str,
        step: int,
        numbers: Sequence[int],
        prefix: Callable[[Task], PrefixRef],
        generate: TimedGenerate,
        ended: Callable[[Sequence[Episode]], Awaitable[None]] | None = None,
        member: int | None = None,
    ) -> tuple[list[Episode], float]:
        """Return the episodes of a step's tasks with these numbers, or `member` of each alone, and
        the model time. Tasks do not depend on the arm."""
        each, seed = self._spec.tasks, self._seed
        tasks = [
            self._source.task(
                f"{arm}/{step + 1}/{i}", step * each + i, f"task/{seed}/{step}/{i}", held_out=False
            )
            for i in numbers
        ]
        sampling = Sampling(max_tokens=self._turn_tokens)
        group, first = (self._spec.group, 0) if member is None else (1, member)
        episodes, compute = await self.play(
            tasks, group, sampling, prefix, f"sample/{seed}/", generate, ended, first
        )
        return [flagged(e, self._source.dialect) for e in episodes], compute

    async def play(
        self,
        tasks: Sequence[Task],
        group: int,
        sampling: Sampling,
        prefix: Callable[[Task], PrefixRef],
        stream: str,
        generate: TimedGenerate,
        ended: Callable[[Sequence[Episode]], Awaitable[None]] | None = None,
        first: int = 0,
    ) -> tuple[list[Episode], float]:
        """Return the episodes and the model time of all their turns. Draws depend on `stream` and
        on the part of a request's name after the arm."""
        spent: list[float] = []

        async def timed(requests: Sequence[GenerateRequest]) -> list[Completion]:
            completions, compute = await generate(requests)
            spent.append(compute)
            return completions

        episodes = await run_episodes(
            tasks,
            timed,
            self._move,
            self._conversation,
            group_size=group,
            sampling=sampling,
            prefix=prefix,
            seed_of=lambda name: stream_seed(stream + name.partition("/")[2]),
            max_context=self._spec.max_context,
            max_turns=self._spec.max_turns,
            ended=ended,
            first=first,
        )
        return await self._rewards.judge(episodes), sum(spent)
