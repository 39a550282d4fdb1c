"""A small clinic desk for tests of the teacher replay: states, teachers and a local provider."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.chat.messages import (
    AgentMessage,
    AgentTool,
    ReplayState,
    TeacherVote,
    TextAction,
    ToolAction,
)
from cartridge_forge.plugins.replay.fake_provider.app import ProviderRequest
from cartridge_forge.plugins.replay.spec import GateSpec, PriceSpec, ReplaySpec, ReplayTeacherSpec

KEY = "sk-test-0123456789abcdef"
KEY_ENV = "FORGE_TEST_TEACHER_KEY"

READ = AgentTool(
    "read_value",
    "Read one value of a note.",
    {
        "type": "object",
        "properties": {"note": {"type": "integer"}, "name": {"type": "string"}},
        "required": ["note", "name"],
    },
)


def a_state(number: int = 0, **other: Any) -> ReplayState:
    """State `number`: the right action is to read note `number`; the student read note 99."""
    facts: dict[str, Any] = {
        "trace_id": f"episode/{number}",
        "turn": 1,
        "messages": (
            AgentMessage("system", "You work at a clinic desk."),
            AgentMessage("user", f"Case {number}. What was the hemoglobin?"),
            AgentMessage("tool", "error: no note 99"),
        ),
        "tools": (READ,),
        "student_action": ToolAction("read_value", {"note": 99, "name": "hemoglobin"}),
        "error_kind": "missing_record",
    }
    return ReplayState(**(facts | other))


def a_teacher(name: str, url: str, provider: str = "openai", **other: Any) -> ReplayTeacherSpec:
    facts: dict[str, Any] = {
        "name": name,
        "provider": provider,
        "model": f"model-{name}",
        "base_url": url,
        "key_env": KEY_ENV,
        "prices": PriceSpec(input=1.25, output=10.0, cached=0.125),
        "max_tokens": 64,
        "timeout_s": 5.0,
        "backoff_s": 0.01,
        "breaker_failures": 1000,
    }
    return ReplayTeacherSpec(**(facts | other))


def a_spec(*teachers: ReplayTeacherSpec, **other: Any) -> ReplaySpec:
    facts: dict[str, Any] = {
        "teachers": teachers,
        "quorum": min(2, len(teachers)),
        "gate": GateSpec(everywhere=True),
        "cap": 100.0,
        "deadline_s": 30.0,
    }
    return ReplaySpec(**(facts | other))


def prices(spec: ReplaySpec) -> dict[str, PriceSpec]:
    return {teacher.model: teacher.prices for teacher in spec.teachers}


def answer(note: int) -> str:
    """A teacher's words: read that note."""
    arguments = json.dumps({"name": "hemoglobin", "note": note})
    return json.dumps({"kind": "tool", "tool": "read_value", "arguments": arguments, "answer": ""})


def canonical_read(note: int) -> str:
    return f'{{"arguments":{{"name":"hemoglobin","note":{note}}},"tool":"read_value"}}'


def case(asked: ProviderRequest) -> int:
    return int(asked.user.split("Case ")[1].split(".")[0])


def right(asked: ProviderRequest) -> str:
    return answer(case(asked))


def wrong(asked: ProviderRequest) -> str:
    return answer(case(asked) + 1000)


def ledger_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


FREE_TEXT = a_state(0, tools=(), student_action=TextAction("halve the dose"))


STATE = a_state()  # the student reads note 99


def votes(*notes: int | None) -> list[TeacherVote]:
    """Teachers t0, t1, ... read these notes; None abstains."""
    return [
        TeacherVote(
            "h", f"t{i}", "k", "", None if n is None else canonical_read(n), None, 0, 0.0, 1, ""
        )
        for i, n in enumerate(notes)
    ]
