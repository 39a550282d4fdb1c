"""Judge the episodes of a run by the rewards of its spec, and count what they gave."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from cartridge_forge.plugins.chat.episodes import Episode, RewardOutcome
from cartridge_forge.plugins.chat.messages import ReplayState, TextAction
from cartridge_forge.plugins.chat.renderer import messages_so_far
from cartridge_forge.plugins.environments.rewards.combining import (
    can_be_judged,
    environments_own,
    judged,
    view_of,
)
from cartridge_forge.plugins.environments.single_turn import columns_of
from cartridge_forge.plugins.environments.spec import RewardSpec
from cartridge_forge.plugins.episodes.clients import RewardClient
from cartridge_forge.plugins.episodes.spec.learn import EpisodesLearn
from cartridge_forge.plugins.replay.client import TeacherReplayClient
from cartridge_forge.plugins.statistics.intervals import mean_interval
from cartridge_forge.plugins.statistics.results import EpisodeMeans
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.services.pool.pool import Pool

NOT_ASKED = RewardOutcome(None, "its replica gave nothing", failed=True)


class EpisodeRewards:
    """Judge by workers, by teachers as judges, and by the environment's own reward."""

    def __init__(self, spec: EpisodesLearn, pools: Mapping[str, Pool]) -> None:
        self._rewards: Sequence[RewardSpec] = spec.reward
        self._of_workers = any(r.of_worker for r in spec.reward)
        self._workers, self._teachers = RewardClient(pools), TeacherReplayClient(pools)
        self._seconds = spec.replay.deadline_s if spec.replay is not None else 0.0

    @property
    def asks_judges(self) -> bool:
        """Return whether teachers are asked, which costs money."""
        return any(r.verifier == "judge" for r in self._rewards)

    async def judge(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Return the episodes with their rewards; those that broke off keep their error."""
        if not self._rewards:
            return list(episodes)
        where = [i for i, e in enumerate(episodes) if can_be_judged(e)]
        chosen = [episodes[i] for i in where]
        by_worker, *by_judge = await asyncio.gather(
            self._by_workers(chosen),
            *(self._by_judge(r, chosen) for r in self._rewards if r.verifier == "judge"),
        )
        judged_episodes = list(episodes)
        for at, (i, episode) in enumerate(zip(where, chosen, strict=True)):
            outcomes = dict(by_worker[at])
            died = outcomes.pop("", NOT_ASKED)
            for column in by_judge:
                outcomes |= column[at]
            for r in self._rewards:
                if r.verifier == "environment":
                    outcomes[r.title] = environments_own(episode)
                elif r.title not in outcomes:
                    outcomes[r.title] = died
            judged_episodes[i] = judged(episode, self._rewards, outcomes)
        return judged_episodes

    async def _by_workers(self, episodes: Sequence[Episode]) -> list[dict[str, RewardOutcome]]:
        if not self._of_workers or not episodes:
            return [{} for _ in episodes]
        return await self._workers.outcomes([view_of(e) for e in episodes])

    async def _by_judge(
        self, reward: RewardSpec, episodes: Sequence[Episode]
    ) -> list[dict[str, RewardOutcome]]:
        async def one(episode: Episode) -> dict[str, RewardOutcome]:
            assert reward.teacher is not None
            answer = columns_of(episode.task).get("answer")
            # A judge reads what the student wrote as any message: it is none of its own.
            state = ReplayState(
                episode.task.id, len(episode.turns),
                messages_so_far(episode.opening, episode.turns), (),
                TextAction(episode.turns[-1].text),
            )  # fmt: skip
            try:
                score, why = await self._teachers.score(
                    reward.teacher, state, reward.rubric, "" if answer is None else str(answer),
                    self._seconds,
                )  # fmt: skip
            except RunError as error:  # the pool lost the call repeatedly: the run goes on
                score, why = None, f"unanswered: {error}"
            return {reward.title: RewardOutcome(score, why, failed=score is None)}

        return list(await asyncio.gather(*map(one, episodes)))

    def is_right(self, episode: Episode) -> bool:
        """Return whether an episode counts as right: by the first reward of the spec, which gave 1
        or more, or by the environment's own reward of 1."""
        if not self._rewards:
            return episode.reward == 1.0
        first = episode.rewards.get(self._rewards[0].title)
        return episode.reward is not None and first is not None and (first.value or 0.0) >= 1.0

    def means(self, episodes: Sequence[Episode]) -> EpisodeMeans:
        """Return the mean reward with its interval, by Student's t; {} without rewards."""
        values = [e.reward for e in episodes if e.reward is not None]
        if not self._rewards or not values:
            return {}
        low, high = mean_interval(values) or (values[0], values[0])
        return {"reward": fmean(values), "reward_ci95": [low, high]}

    def end(self) -> None:
        """End the processes of rewards that are computed here: none."""
        return

    def counted(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Return each reward's mean over the episodes that it judged, and how often it failed or
        had no opinion, for metrics."""
        counts: Counter[str] = Counter()
        means: dict[str, Any] = {}
        for reward in self._rewards:
            outcomes = [e.rewards[reward.title] for e in episodes if reward.title in e.rewards]
            values = [o.value for o in outcomes if o.value is not None]
            if values:
                means[f"reward/{reward.title}"] = math.fsum(values) / len(values)
            for outcome in outcomes:
                if outcome.value is None:
                    what = "failed" if outcome.failed else "left_out"
                    counts[f"reward/{reward.title}/{what}"] += 1
        return {**means, **counts}
