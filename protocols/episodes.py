"""Episodes: a student's turns with an environment's tools, in exact tokens.

    Task --reset--> Observation --turn--> Observation --turn--> ... done, with a reward

A turn's context is what stood before it, token for token: text is never re-tokenised. Where a chat
template does not keep what stood before as a prefix, the episode branches: each branch is a
sequence of its own to train on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from protocols.teacher_replay import AgentMessage, AgentTool
from protocols.types import Sampling


@dataclass(frozen=True)
class Task:
    """What an environment is reset to: `Task("desk/12/0", "desk_01", {"desk": "desk_01",
    "seed": 4711})`. The same arguments give the same episode to the same actions.

    `document` is whose cartridge the student reads; `arguments` are the environment's own.
    """

    id: str
    document: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Observation:
    """What the environment said: the messages that the agent sees next, and how things stand.

    `reward` is there when `done` is. A failed call has its `error_kind` ("missing_record") and the
    `hint_key` of a template that would help, with that template's `hint_facts`. `error` is the
    environment's own failure ("environment_died: ..."): the episode ends there without a reward.
    `expected` is the right answer, for checks after the episode; the agent never sees it.
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


@dataclass(frozen=True)
class EnvironmentRequest:
    """One step that is asked of an environment: `actions` are all of the episode so far, the last
    one new; none is a reset. Whoever lost the episode plays the others again first."""

    task: Task
    actions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Turn:
    """One turn of the student: what it read, what it wrote, and what came of it.

    `context_ids` is everything after the cartridge that stood before the turn; `response_ids` ends
    with the end token where it was sampled. `branch` counts up where `context_ids` does not begin
    with the turn before and its response.
    """

    context_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str
    observation: Observation
    branch: int = 0


@dataclass(frozen=True)
class Episode:
    """A whole episode. `reward` is None when it could not be judged, and `error_kind` says why:
    "environment_died", "context_full", "no_verdict". `flags` are the monitors' findings."""

    task: Task
    group: str
    opening: Observation
    turns: tuple[Turn, ...]
    sampling: Sampling
    reward: float | None
    error_kind: str = ""
    flags: tuple[str, ...] = ()
