"""Define the records of the teacher replay: states that the student met, votes, and preferences.

    ReplayState --N teachers--> TeacherVote x N --counted--> PanelVerdict --> PreferenceActions

All are plain data that cross processes unchanged; `plugins.replay.vote_records` writes each as one
line of JSON. Money is counted in whole nanodollars, so that sums are exact however they are
grouped: a price of $1.25 per million tokens is 1250 nanodollars a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

NANO = 1_000_000_000  # nanodollars in a dollar

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class AgentMessage:
    """Hold one message as the agent saw it: `AgentMessage("tool", "hemoglobin 9.1 g/dl")`."""

    role: Role
    content: str


@dataclass(frozen=True)
class AgentTool:
    """Describe a tool that the agent may call; `parameters` is the JSON schema of its arguments.

    `AgentTool("read_value", "Read one value of a note.", {"type": "object", "properties": {"note":
    {"type": "integer"}, "name": {"type": "string"}}, "required": ["note", "name"]})`
    """

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class ToolAction:
    """Call a tool: `ToolAction("read_value", {"note": 3, "name": "hemoglobin"})`."""

    tool: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OptionAction:
    """Choose one of the state's options, by its letter or its words: `OptionAction("B")`."""

    option: str


@dataclass(frozen=True)
class TextAction:
    """Answer in free words: `TextAction("the dose was halved")`."""

    text: str


Action = ToolAction | OptionAction | TextAction


@dataclass(frozen=True)
class ReplayState:
    """Hold a state that the student met in a finished episode, and its action there.

    `ReplayState("episode/12/3", 4, (AgentMessage("user", "What was the hemoglobin?"),
    AgentMessage("tool", "error: no note 9")), (read_value,), ToolAction("read_value", {"note": 9,
    "name": "hemoglobin"}), error_kind="missing_record", confidence=0.41)`

    `turn` counts the agent's turns from 0; `messages` are all messages before this turn. `options`
    are the answers of a multiple choice, lettered A, B, ... in this order. Two fields decide
    whether teachers are called: `error_kind` names the failure that this turn met ("" for none),
    `confidence` is the student's own probability of its action, in [0, 1] (None: not known).
    """

    trace_id: str
    turn: int
    messages: tuple[AgentMessage, ...]
    tools: tuple[AgentTool, ...]
    student_action: Action
    options: tuple[str, ...] = ()
    error_kind: str = ""
    confidence: float | None = None


@dataclass(frozen=True)
class TeacherUsage:
    """Count tokens of one call: `TeacherUsage(812, 41, 512)` read 812 at the full price, 512 from a
    cache."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class TeacherVote:
    """Hold one teacher's action in a state, or why it abstains.

    `TeacherVote("9f2c...", "opus", "41d0...", '{"kind": "tool", ...}',
    '{"arguments":{"note":3},"tool":"read_value"}', TeacherUsage(812, 41), 3180000, 1.9, 2, "")`

    `canonical` is None for an abstention, and `error` is then one of: "refused", "unparseable:
    why", "http_500", "rate_limited", "timeout", "cut_off", "unreadable", "unreachable",
    "interrupted", "circuit_open", "budget_run", "budget_teacher", "price_exceeded", "deadline", or
    "not_in_ledger". `nanodollars` and `latency_s` are of the call that answered (or failed last).
    `usage` is None where the provider sent none; the worst case then counts as paid. `key` is the
    call's in the ledger.
    """

    state_hash: str
    teacher: str
    key: str
    raw: str
    canonical: str | None
    usage: TeacherUsage | None
    nanodollars: int
    latency_s: float
    attempts: int
    error: str


VerdictReason = Literal[
    "pair",  # a quorum of teachers prefer one action, and the student took another
    "not_worth_asking",  # the gate: no teacher was called
    "too_few_votes",  # fewer valid votes than the quorum
    "disagreement",  # enough votes, no quorum
    "tie",  # two actions share the most votes
    "agrees_with_student",
]


@dataclass(frozen=True)
class PanelVerdict:
    """Hold the outcome of the votes in one state, with the votes.

    `PanelVerdict("9f2c...", "episode/12/3", 4, "pair", '{"choice":"B"}', '{"choice":"A"}',
    (('{"choice":"B"}', 2), ('{"choice":"C"}', 1)), votes, "error_turn")`

    `chosen` and `rejected` (the student's) are canonical actions; `chosen` is None unless `reason`
    is "pair". `counts` are the valid votes, most first; `asked_because` is the gate's reason.
    """

    state_hash: str
    trace_id: str
    turn: int
    reason: VerdictReason
    chosen: str | None
    rejected: str
    counts: tuple[tuple[str, int], ...]
    votes: tuple[TeacherVote, ...]
    asked_because: str


@dataclass(frozen=True)
class PreferenceActions:
    """Hold a teachers' action that is preferred over the student's, as text.

    `PreferenceActions("9f2c...", "episode/12/3", 4, '{"choice":"B"}', '{"choice":"A"}', 2, 3)`: two
    of three valid votes. The student's own template tokenises both. `ref_version` is the version
    whose log-probabilities are the reference, None until they are computed. `opposing` votes were
    for the student's action.
    """

    state_hash: str
    trace_id: str
    turn: int
    chosen: str
    rejected: str
    agreeing: int
    valid: int
    ref_version: int | None = None
    opposing: int = 0
