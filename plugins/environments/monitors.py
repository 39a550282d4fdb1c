"""Count episodes, and flag those whose reward may not be earned or whose text is degenerate.

Flags are for people who inspect a run; they do not change training. The module does no I/O.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from cartridge_forge.plugins.chat.episodes import Episode, Turn
from cartridge_forge.plugins.chat.messages import Action, OptionAction, TextAction, ToolAction
from cartridge_forge.plugins.environments.action_parsing import ActionFormat
from cartridge_forge.plugins.environments.hints import expected_of, holds, words
from cartridge_forge.plugins.environments.single_turn import ROW

FLAGS = {
    "answer_not_through_tools": "rewarded for a value that no tool had shown before",
    "degenerate": "an empty turn, a loop, or every turn cut off at its length",
    "copied": "a whole message given as the answer",
    "verifier_disagrees": "the expected answer, compared by us, differs from the reward",
}

LOOP_TIMES = 4  # occurrences of the same three tokens in one turn, and
LOOP_SHARE = 0.25  # their share of the turn: long JSON also repeats its punctuation
COPIED_WORDS = 2  # a message of one word may be the value itself


def flagged(episode: Episode, dialect: ActionFormat) -> Episode:
    """Return the episode with `flags` set to those of FLAGS that apply. Of a single answer to a
    prompt without tools, only its form is looked at: there was nothing to look up."""
    marks = {"degenerate": _degenerate(episode)}
    looked_up = ROW not in episode.task.arguments or bool(episode.opening.tools)
    if episode.reward is not None and episode.turns and looked_up:
        value = claimed(dialect.parse(episode.turns[-1].text))
        marks |= {
            "answer_not_through_tools": _not_through_tools(episode, value, dialect),
            "copied": _copied(episode, value),
            "verifier_disagrees": _disagrees(episode, value),
        }
    return replace(episode, flags=tuple(name for name in FLAGS if marks.get(name)))


def count_flags(episodes: Sequence[Episode]) -> Counter[str]:
    """Return the number of episodes with each flag."""
    return Counter(flag for e in episodes for flag in e.flags)


def environment_counts(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return count, errors and mean reward of each environment's episodes."""
    counts: dict[str, float] = {}
    for name in sorted({e.task.environment for e in episodes}):
        of_environment = [e for e in episodes if e.task.environment == name]
        rewards = [e.reward for e in of_environment if e.reward is not None]
        counts[f"environment/{name}/count"] = len(of_environment)
        counts[f"environment/{name}/errored"] = len(of_environment) - len(rewards)
        if rewards:
            counts[f"environment/{name}/reward"] = math.fsum(rewards) / len(rewards)
    return counts


def claimed(action: Action) -> str:
    """Return what an action gives as its answer: a call's arguments, an option, or the text."""
    match action:
        case ToolAction(_, arguments):
            return " ".join(str(value) for value in arguments.values())
        case OptionAction(option):
            return option
        case TextAction(text):
            return text


def _degenerate(episode: Episode) -> bool:
    full = episode.sampling.max_tokens
    cut = bool(episode.turns) and all(len(t.response_ids) >= full for t in episode.turns)
    return cut or any(not words(t.text) or _loops(t.response_ids) for t in episode.turns)


def _loops(ids: Sequence[int]) -> bool:
    most = max(Counter(zip(ids, ids[1:], ids[2:], strict=False)).values(), default=0)
    return most >= LOOP_TIMES and 3 * most >= LOOP_SHARE * len(ids)


def _not_through_tools(episode: Episode, value: str, dialect: ActionFormat) -> bool:
    """Return whether a rewarded value appears in no reply of an allowed tool. Failed calls do not
    count: their error messages often repeat the requested value."""
    offered = {tool.name for tool in episode.opening.tools}

    def showed(turn: Turn) -> bool:
        action = dialect.parse(turn.text)
        allowed = isinstance(action, ToolAction) and (not offered or action.tool in offered)
        observation = turn.observation
        return (
            allowed
            and not observation.error_kind
            and any(holds(m.content, value) for m in observation.messages)
        )

    return _rewarded(episode) and not any(showed(turn) for turn in episode.turns[:-1])


def _copied(episode: Episode, value: str) -> bool:
    expected = expected_of(episode)
    if expected is not None and words(value) == words(expected):
        return False
    earlier = (episode.opening, *(turn.observation for turn in episode.turns[:-1]))
    return any(
        len(words(m.content)) >= COPIED_WORDS and holds(value, m.content)
        for observation in earlier
        for m in observation.messages
    )


def _disagrees(episode: Episode, value: str) -> bool:
    expected = expected_of(episode)
    return expected is not None and (words(value) == words(expected)) != _rewarded(episode)


def _rewarded(episode: Episode) -> bool:
    return episode.reward is not None and episode.reward > 0
