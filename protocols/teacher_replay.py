"""The teacher replay: states that the student met, what teachers would do there, and the pairs.

    ReplayState --asked of N teachers--> Vote x N --counted--> Verdict --> PreferenceActions

Plain data: every record crosses processes as it is, and `teachers.vote_records` writes each as one
line of
JSON. Money is counted in whole nanodollars, so that sums are exact however they are grouped:
a price of $1.25 per million tokens is 1250 nanodollars a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

NANO = 1_000_000_000  # nanodollars in a dollar

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class AgentMessage:
    """One turn as the agent saw it: `AgentMessage("tool", "hemoglobin 9.1 g/dl")`."""

    role: Role
    content: str


@dataclass(frozen=True)
class AgentTool:
    """A tool that the agent may call; `parameters` is the JSON schema of its arguments.

    `AgentTool("read_value", "Read one value of a note.", {"type": "object", "properties":
    {"note": {"type": "integer"}, "name": {"type": "string"}}, "required": ["note", "name"]})`
    """

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class ToolAction:
    """`ToolAction("read_value", {"note": 3, "name": "hemoglobin"})`."""

    tool: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OptionAction:
    """One of the state's options, by its letter or its words: `OptionAction("B")`."""

    option: str


@dataclass(frozen=True)
class TextAction:
    """An answer in free words: `TextAction("the dose was halved")`."""

    text: str


Action = ToolAction | OptionAction | TextAction


@dataclass(frozen=True)
class ReplayState:
    """A state that the student met in a finished episode, and what it did there.

    `ReplayState("episode/12/3", 4, (Message("user", "What was the hemoglobin?"),
    Message("tool", "error: no note 9")), (read_value,), ToolAction("read_value", {"note": 9,
    "name": "hemoglobin"}), error_kind="missing_record", confidence=0.41)`

    `turn` counts the agent's turns from 0; `messages` is all it saw before this one. `options` are
    the answers of a multiple choice, lettered A, B, ... in this order. Why it may be worth asking:
    `error_kind` names the failure that this turn met ("" for none), `confidence` is the student's
    own probability of its action, in [0, 1] (None: not known).
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
    """Tokens of one call: `TeacherUsage(812, 41, 512)` read 812 at the full price and 512 from a
    cache."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class TeacherVote:
    """What one teacher would do in a state, or why it abstains.

    `TeacherVote("9f2c...", "opus", "41d0...", '{"kind": "tool", ...}',
    '{"arguments":{"note":3},"tool":"read_value"}', Usage(812, 41), 3180000, 1.9, 2, "")`

    `canonical` is None for an abstention, and `error` then says which: "refused", "unparseable:
    why", "http_500", "rate_limited", "timeout", "cut_off", "unreadable", "unreachable",
    "interrupted", "circuit_open", "budget_run", "budget_teacher", "price_exceeded", "deadline", or
    "not_in_ledger". `nanodollars` and `latency_s` are of the call that answered (or failed last);
    `usage` is None where the provider did not say, and the worst case is then taken as paid.
    `key` is the call's in the ledger.
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
    "pair",  # a quorum of teachers would do one and the same, and the student did another thing
    "not_worth_asking",  # the gate: nobody was asked
    "too_few_votes",  # fewer valid votes than the quorum
    "disagreement",  # enough votes, no quorum
    "tie",  # two actions share the most votes
    "agrees_with_student",
]


@dataclass(frozen=True)
class PanelVerdict:
    """What the votes of one state come to, with all that led to it.

    `PanelVerdict("9f2c...", "episode/12/3", 4, "pair", '{"choice":"B"}', '{"choice":"A"}',
    (('{"choice":"B"}', 2), ('{"choice":"C"}', 1)), votes, "error_turn")`

    `chosen` and `rejected` (the student's) are canonical actions, `chosen` None but for a pair.
    `counts` are the valid votes, most first; `asked_because` is the gate's reason.
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
    """Teachers' action over the student's, as text: re-tokenised in the student's own template.

    `PreferenceActions("9f2c...", "episode/12/3", 4, '{"choice":"B"}', '{"choice":"A"}', 2, 3)`: two
    of
    three valid votes. `ref_version` is the version whose log-probabilities are the reference, None
    until they are computed.
    """

    state_hash: str
    trace_id: str
    turn: int
    chosen: str
    rejected: str
    agreeing: int
    valid: int
    ref_version: int | None = None
