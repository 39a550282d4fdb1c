"""Show an episode to rewards, and sum what they give it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from cartridge_forge.plugins.chat.episodes import Episode, RewardOutcome
from cartridge_forge.plugins.chat.renderer import messages_so_far
from cartridge_forge.plugins.environments.single_turn import columns_of
from cartridge_forge.plugins.environments.spec import RewardSpec

FAILED, LEFT_OUT = "reward_failed", "reward_left_out"  # kinds of an episode without a reward
UNDECIDED = "no_verdict"  # the environment gave no reward, which others may


def can_be_judged(episode: Episode) -> bool:
    """Return whether rewards judge the episode: it has a turn, and nothing broke it off."""
    return bool(episode.turns) and episode.error_kind in ("", UNDECIDED)


def view_of(episode: Episode) -> dict[str, Any]:
    """Return what a reward is told of an episode, as plain JSON."""
    opening = [asdict(m) for m in episode.opening.messages]
    prompts = [m["content"] for m in opening if m["role"] == "user"]
    last = episode.turns[-1]
    return {
        "id": episode.task.id,
        "prompt": prompts[-1] if prompts else "",
        "plain": len(opening) == 1,
        "opening": opening,
        "messages": [asdict(m) for m in messages_so_far(episode.opening, episode.turns)],
        "completion": last.text,
        "completion_ids": list(last.response_ids),
        "truncated": last.finish_reason == "length",
        "turns": len(episode.turns),
        "environment_reward": episode.reward,
        "document": episode.task.document,
        "columns": columns_of(episode.task),
    }


def environments_own(episode: Episode) -> RewardOutcome:
    """Return the environment's own reward as an outcome."""
    return RewardOutcome(episode.reward, "" if episode.reward is not None else "it gave none")


def judged(
    episode: Episode, rewards: Sequence[RewardSpec], outcomes: Mapping[str, RewardOutcome]
) -> Episode:
    """Return the episode with the sum of weight times value as its reward. It has none, and is not
    trained on, where a reward with a weight gave no value: a sum without it compares with no
    other."""
    lacking = [outcomes[r.title] for r in rewards if r.weight and outcomes[r.title].value is None]
    if lacking:
        kind = FAILED if any(o.failed for o in lacking) else LEFT_OUT
        return replace(episode, reward=None, error_kind=kind, rewards=dict(outcomes))
    total = math.fsum(r.weight * (outcomes[r.title].value or 0.0) for r in rewards)
    return replace(episode, reward=total, error_kind="", rewards=dict(outcomes))
