"""Say why episodes have no reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cartridge_forge.protocols.episodes import Episode

MEANINGS = {
    "context_full": "context_full: its context exceeds episodes.max_context",
    "no_verdict": "no_verdict: its environment gave no reward within episodes.max_turns",
}


def reason(episode: Episode) -> str:
    """Return why an episode has no reward, with the place where a user's code names one:
    "environment_refused: ValueError: too late (guess.py:12)"."""
    observation = episode.turns[-1].observation if episode.turns else episode.opening
    if observation.error:
        return observation.error
    for name, outcome in episode.rewards.items():
        if outcome.value is None and outcome.why:
            return f"{episode.error_kind}: {name}: {outcome.why}"
    if observation.error_kind:  # what the student wrote was not understood
        messages = " ".join(m.content for m in observation.messages)
        return f"{episode.error_kind} after {observation.error_kind}: {messages}"[:500]
    return MEANINGS.get(episode.error_kind, episode.error_kind)


def not_judged(episodes: Sequence[Episode]) -> list[Episode]:
    """Return the episodes that have no reward by a failure of their environment or of a reward,
    and not by what the student wrote."""
    return [e for e in episodes if e.error_kind.startswith(("environment_", "reward_"))]


def all_failed(episodes: Sequence[Episode]) -> str | None:
    """Return a warning with the commonest reason where no episode of a step has a reward; None
    where one has, and for no episodes."""
    if not episodes or any(e.reward is not None for e in episodes):
        return None
    return (
        f"none of {len(episodes)} episodes has a reward; {commonest_reason(episodes)}; "
        "forge env check MESH plays a few"
    )


def commonest_reason(episodes: Sequence[Episode]) -> str:
    """Return the commonest reason and its number: "3 of them: environment_died: ..."."""
    (commonest, count), *_ = Counter(map(reason, episodes)).most_common(1)
    return f"{count} of them: {commonest}"
