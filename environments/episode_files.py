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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from protocols.episodes import Episode, Observation, Task, Turn
from protocols.errors import DataError
from protocols.types import Sampling

SCHEMA = 1
RECORD = "episode"


@dataclass(frozen=True)
class TurnSpan:
    """Hold a turn whose response ids are the span `start` to `stop` of its branch's ids."""

    branch: int
    start: int
    stop: int
    sampler_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str
    observation: Observation
    finish_reason: str = ""


@dataclass(frozen=True)
class EpisodeFileRow:
    task: Task
    group: str
    opening: Observation
    sampling: Sampling
    reward: float | None
    error_kind: str
    flags: tuple[str, ...]
    branches: tuple[tuple[int, ...], ...]
    turns: tuple[TurnSpan, ...]


_ROW = TypeAdapter(EpisodeFileRow)


def to_row(episode: Episode, arm: str, step: int) -> dict[str, Any]:
    """Return the episode as plain JSON values; `arm` and `step` are those of its run."""
    branches: list[tuple[int, ...]] = []
    spans: list[TurnSpan] = []
    for turn in episode.turns:
        whole = (*turn.context_ids, *turn.response_ids)
        if turn.branch == len(branches):
            branches.append(whole)
        else:
            stood = branches[turn.branch]
            assert whole[: len(stood)] == stood, f"{episode.task.id}: a branch was rewritten"
            branches[turn.branch] = whole
        spans.append(
            TurnSpan(
                turn.branch, len(turn.context_ids), len(whole), turn.sampler_logprobs,
                turn.versions, turn.text, turn.observation, turn.finish_reason,
            )
        )  # fmt: skip
    row = EpisodeFileRow(
        episode.task, episode.group, episode.opening, episode.sampling, episode.reward,
        episode.error_kind, episode.flags, tuple(branches), tuple(spans),
    )  # fmt: skip
    head = {"schema": SCHEMA, "record": RECORD, "arm": arm, "step": step}
    return head | _ROW.dump_python(row, mode="json")


def from_row(row: Mapping[str, Any]) -> Episode:
    """Return the episode that `to_row` wrote. Raises DataError for any other row."""
    try:
        if (row["schema"], row["record"]) != (SCHEMA, RECORD):
            raise ValueError(f"schema {row['schema']} of a {row['record']}")
        read = _ROW.validate_python(dict(row))
        turns = tuple(_turn(span, read.branches[span.branch]) for span in read.turns)
    except (KeyError, IndexError, ValueError, ValidationError) as error:
        raise DataError(
            f"a row of an episode, schema {SCHEMA}, was expected: got another "
            f"({str(error).splitlines()[0]}); read it with the version that wrote it"
        ) from error
    return Episode(
        read.task, read.group, read.opening, turns, read.sampling, read.reward, read.error_kind,
        read.flags,
    )  # fmt: skip


def _turn(span: TurnSpan, ids: tuple[int, ...]) -> Turn:
    return Turn(
        ids[: span.start], ids[span.start : span.stop], span.sampler_logprobs, span.versions,
        span.text, span.observation, span.branch, span.finish_reason,
    )  # fmt: skip
