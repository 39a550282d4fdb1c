"""Define episodes: a student's turns with an environment's tools, in exact tokens.

    Task --reset--> Observation --turn--> Observation --turn--> ... done, with a reward

The context of a turn begins with the context of the turn before, token for token: text is never
re-tokenised. Where a chat template does not keep the earlier context as a prefix, the episode
branches. Each branch is trained as a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cartridge_forge.plugins.chat.messages import AgentMessage, AgentTool
from cartridge_forge.protocols.step import OFFLINE_VERSION, Sampling, TimedReply


@dataclass(frozen=True)
class Task:
    """Describe an environment's reset: `Task("desk/12/0", "desk_01", {"desk": "desk_01", "seed":
    4711})`. The same arguments and the same actions give the same episode. `document` names the
    document whose cartridge the student reads; `arguments` are the environment's own. `environment`
    names one of several; "" is the only one."""

    id: str
    document: str
    arguments: Mapping[str, Any]
    environment: str = ""


@dataclass(frozen=True)
class Observation:
    """Carry an environment's reply: the messages that the agent sees next, and the episode's state.

    `reward` is set when `done` is. A failed call sets its `error_kind` ("missing_record") and the
    `hint_key` of a template that would help, with that template's `hint_facts`. `error` is a
    failure of the environment itself ("environment_died: ..."): the episode then ends without a
    reward. With `new_conversation` the agent's next turn reads the last message alone. `expected`
    is the right answer, for checks after the episode; the agent never sees it.
    """

    messages: tuple[AgentMessage, ...] = ()
    tools: tuple[AgentTool, ...] = ()
    done: bool = False
    reward: float | None = None
    error_kind: str = ""
    hint_key: str = ""
    hint_facts: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    expected: str | None = None
    new_conversation: bool = False


@dataclass(frozen=True)
class EnvironmentReply(TimedReply):
    """Carry an environment actor's reply: observations in the order of the requests."""

    observations: tuple[Observation, ...] = ()


@dataclass(frozen=True)
class EnvironmentRequest:
    """Request one step of an environment. `actions` are all actions of the episode so far, of which
    the last is new; an empty tuple is a reset. An actor without the episode replays the earlier
    ones first."""

    task: Task
    actions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Turn:
    """Record one turn of the student: its context, its response and the observation that followed.

    `context_ids` are all tokens between the cartridge and the response; `response_ids` ends with
    the end token where it was sampled. `branch` increases by one where `context_ids` does not begin
    with the context and response of the turn before. `finish_reason` is the completion's ("length":
    the limit of tokens cut it); "" where it was not recorded. `taught` are the places of the
    response's tokens that the document's teacher drew in a verified rollout.
    """

    context_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str
    observation: Observation
    branch: int = 0
    finish_reason: str = ""
    taught: tuple[int, ...] = ()


@dataclass(frozen=True)
class RewardOutcome:
    """Hold what one reward gave an episode: a finite number, or None with the reason.

    `RewardOutcome(None, "rewards.py:7: ZeroDivisionError: division by zero", failed=True)`; without
    `failed` the reward has no opinion: it gave None, or what is no number.
    """

    value: float | None
    why: str = ""
    failed: bool = False


@dataclass(frozen=True)
class RewardReply(TimedReply):
    """Carry a reward actor's reply: the outcome of each reward by name, in the order of the
    episodes."""

    outcomes: tuple[dict[str, RewardOutcome], ...] = ()


@dataclass(frozen=True)
class Episode:
    """Record a whole episode. `reward` is None when the episode could not be judged, and
    `error_kind` then names the cause: "environment_died", "context_full", "no_verdict",
    "reward_failed", "reward_left_out". `flags` are the monitors' findings, `rewards` what each
    reward of the spec gave, by name."""

    task: Task
    group: str
    opening: Observation
    turns: tuple[Turn, ...]
    sampling: Sampling
    reward: float | None
    error_kind: str = ""
    flags: tuple[str, ...] = ()
    rewards: Mapping[str, RewardOutcome] = field(default_factory=dict)


@dataclass(frozen=True)
class TurnHint:
    """Hold the hint of a failed turn: `TurnHint("desk/12/0/1", 0, "read note 17.")`.

    `why` says why there is none: "no_hint", "leaks_answer" (`text` then is what was dropped),
    "no_sibling", "writer_failed", "writer_timeout", "too_long" or "empty_turn".
    """

    episode: str
    turn: int
    text: str
    why: str = ""


def written_offline(episode: Episode) -> Episode:
    """Return an episode whose turns the document teacher wrote: they carry no version."""
    turns = (
        replace(turn, versions=(OFFLINE_VERSION,) * len(turn.response_ids))
        for turn in episode.turns
    )
    return replace(episode, turns=tuple(turns))
