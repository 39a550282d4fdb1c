"""Write episodes as lines of JSON and read them back equal.

    {"schema": 1, "record": "episode", "arm": "on_policy", "step": 12, "task": {...},
     "group": "desk/12/0", "reward": 1.0, "error_kind": "", "flags": [], ...,
     "branches": [[60, 61, 2, 7, 8, 40, 2, 9]],
     "turns": [{"branch": 0, "start": 3, "stop": 5, "sampler_logprobs": [-0.1, -0.7],
                "versions": [3, 3], "text": "find surgeon in urology.", "observation": {...}},
               {"branch": 0, "start": 7, "stop": 8, ...}]}

Each branch stores its token ids once. A turn's context is the part of its branch before `start`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from cartridge_forge.protocols.episodes import Episode, TurnHint
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
