"""Write episodes as lines of JSON and read them back equal.

    {"schema": 1, "record": "episode", "arm": "on_policy", "step": 12, "task": {...},
     "group": "desk/12/0", "reward": 1.0, "error_kind": "", "flags": [], ...,
     "branches": [[60, 61, 2, 7, 8, 40, 2, 9]],
     "turns": [{"branch": 0, "start": 3, "stop": 5, "sampler_logprobs": [-0.1, -0.7],
                "versions": [3, 3], "text": "find surgeon in urology.", "observation": {...}},
               {"branch": 0, "start": 7, "stop": 8, ...}]}

Each branch stores its token ids once. A turn's context is the part of its branch before `start`.

`reason` says why an episode has no reward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from cartridge_forge.plugins.chat.episodes import Episode, TurnHint
from cartridge_forge.protocols.errors import DataError

SCHEMA = 1
RECORD = "episode"
_EPISODE = TypeAdapter(Episode)


def to_row(episode: Episode, arm: str, step: int, hints: Sequence[TurnHint] = ()) -> dict[str, Any]:
    """Return the episode as plain JSON values; `arm` and `step` are those of its run. The turn of
    each of `hints` gets "hint", its text, and "no_hint", why it was not used, "" if it was."""
    branches: list[list[int]] = []
    spans = []
    row = _EPISODE.dump_python(episode, mode="json")
    for turn in row.pop("turns"):
        context, response, branch = (turn.pop(k) for k in ("context_ids", "response_ids", "branch"))
        if not turn["taught"]:  # as in files of earlier versions
            del turn["taught"]
        token_ids = [*context, *response]
        if branch == len(branches):
            branches.append(token_ids)
        else:
            previous = branches[branch]
            assert token_ids[: len(previous)] == previous, (
                f"{episode.task.id}: a branch was rewritten"
            )
            branches[branch] = token_ids
        spans.append({"branch": branch, "start": len(context), "stop": len(token_ids), **turn})
    for hint in hints:
        spans[hint.turn] |= {"hint": hint.text, "no_hint": hint.why}
    head = {"schema": SCHEMA, "record": RECORD, "arm": arm, "step": step}
    return {**head, **row, "branches": branches, "turns": spans}


def from_row(row: Mapping[str, Any]) -> Episode:
    """Return the episode that `to_row` wrote. Raises DataError for any other row."""
    try:
        if (row["schema"], row["record"]) != (SCHEMA, RECORD):
            raise ValueError(f"schema {row['schema']} of a {row['record']}")
        turns = []
        for span in row["turns"]:
            ids, start, stop = row["branches"][span["branch"]], span["start"], span["stop"]
            turns.append({**span, "context_ids": ids[:start], "response_ids": ids[start:stop]})
        return _EPISODE.validate_python({**row, "turns": turns})
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"a row of an episode, schema {SCHEMA}, was expected: got another "
            f"({str(error).splitlines()[0]}); read it with the version that wrote it"
        ) from error


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
