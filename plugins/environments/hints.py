"""Choose the text of a failed turn's hint; drop what reveals the answer.

template    a text of the environment's registry, filled in with the facts of the failure
feedback    the environment's own text of the error
sibling     a successful episode of the same task, as a demonstration
written     by a model, which gets the conversation and the error (training.recipes.hint_writers)

A hint is read by the teacher alone, never by the student. A demonstration holds the answer by
construction, so the leak check applies to the other three.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cartridge_forge.plugins.chat.episodes import Episode, Observation, TurnHint
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import messages_so_far

# A number keeps its sign and its fraction; any other word is letters and digits.
_WORD = re.compile(r"(?<!\w)[-+]?\d+(?:[.,]\d+)*\w*|\w+")
_SQUEEZED = 5  # characters; many unrelated words contain a shorter answer


@dataclass(frozen=True)
class FailedTurn:
    """Hold a turn that met a failure: `turn` counts the episode's turns from 0."""

    episode: Episode
    turn: int

    @property
    def seen(self) -> Observation:
        """Return the observation that reported the failure."""
        return self.episode.turns[self.turn].observation

    @property
    def messages(self) -> tuple[AgentMessage, ...]:
        """Return the conversation up to that observation."""
        return messages_so_far(self.episode.opening, self.episode.turns[: self.turn + 1])


def failed_turns(episodes: Sequence[Episode]) -> list[FailedTurn]:
    """Return the turns that met a failure, in order."""
    return [
        FailedTurn(e, t)
        for e in episodes
        for t, turn in enumerate(e.turns)
        if turn.observation.error_kind
    ]


def template_hint(failed: FailedTurn, templates: Mapping[str, str]) -> TurnHint:
    """Return the template of the failure's hint key with its facts: `{"where": "the handbook says
    {field} {department}."}`."""
    observation = failed.seen
    text = _filled(templates.get(observation.hint_key, ""), observation.hint_facts)
    return checked_hint(failed, text, expected_of(failed.episode))


def feedback_hint(failed: FailedTurn) -> TurnHint:
    """Return what the environment said of the failure."""
    text = "\n".join(m.content for m in failed.seen.messages)
    return checked_hint(failed, text, expected_of(failed.episode))


def sibling_hint(failed: FailedTurn, episodes: Sequence[Episode], reward: float) -> TurnHint:
    """Return the shortest other episode of the group with at least this `reward`, as a transcript
    of its turns and what they met; the first of equally short ones. It is not checked for the
    answer, which it holds."""
    episode = failed.episode
    siblings = [
        e
        for e in episodes
        if e.group == episode.group
        and e.task.id != episode.task.id
        and e.reward is not None
        and e.reward >= reward
    ]
    if not siblings:
        return TurnHint(episode.task.id, failed.turn, "", "no_sibling")
    best = min(siblings, key=lambda e: len(e.turns))
    messages = [
        message
        for turn in best.turns
        for message in (AgentMessage("assistant", turn.text), *turn.observation.messages)
    ]
    return TurnHint(
        episode.task.id, failed.turn, "\n".join(f"{m.role}: {m.content.strip()}" for m in messages)
    )


def checked_hint(
    failed: FailedTurn, text: str, expected: str | None, why: str = "no_hint"
) -> TurnHint:
    """Return a hint with this text, unless the text is empty, for the reason `why`, or reveals the
    `expected` answer. Nothing is checked where that is None: the answer is not known."""
    text = text.strip()
    if text:
        why = "leaks_answer" if expected is not None and leaks(text, expected) else ""
    return TurnHint(failed.episode.task.id, failed.turn, text, why)


def expected_of(episode: Episode) -> str | None:
    """Return the right answer, or None; many environments reveal it only at the end."""
    observations = (episode.opening, *(turn.observation for turn in episode.turns))
    return next((o.expected for o in reversed(observations) if o.expected is not None), None)


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text, folded: case, width, punctuation and whitespace do not matter."""
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def holds(text: str, part: str) -> bool:
    """Return whether the words of `part`, if any, occur consecutively in `text`."""
    inner, outer = words(part), words(text)
    return bool(inner) and any(
        outer[i : i + len(inner)] == inner for i in range(len(outer) - len(inner) + 1)
    )


def leaks(hint: str, answer: str) -> bool:
    """Return whether a hint contains the answer: its words, or its letters spaced differently."""
    squeezed = "".join(words(answer))
    inside = len(squeezed) >= _SQUEEZED and squeezed in "".join(words(hint))
    return inside or holds(hint, answer)


def _filled(template: str, facts: Mapping[str, str]) -> str:
    """Return the template with its facts; "" if a fact is missing."""
    try:
        return template.format_map(facts)
    except KeyError:
        return ""
