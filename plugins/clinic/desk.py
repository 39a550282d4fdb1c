"""Simulate a clinic desk whose tools a tiny model uses to look up one value.

A desk has a handbook that maps each field to the department with its records. Asked for a field's
value, a clerk finds the note, reads it and answers:

    user        what is the surgeon?
    assistant   find surgeon in cardiology.      (the handbook says: surgeon cardiology.)
    tool        note 17.
    assistant   read note 17.
    tool        surgeon weber.
    assistant   answer weber.

Notes and values are drawn anew for every case, so only the tools reveal them. A clerk without the
handbook guesses departments and gets errors: `missing_record`, `unknown_tool`, `bad_arguments`.

A shift is several cases, one after another, with one reward: 1 if every case was answered right.
Each case is a conversation of its own, and a clerk hears of no result before the end. The module
does no I/O.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cartridge_forge.plugins.chat.messages import AgentTool, ToolAction
from cartridge_forge.plugins.clinic import vocabulary as words
from cartridge_forge.protocols.errors import DataError

TEXT = {"type": "string"}
TOOLS: tuple[AgentTool, ...] = (
    AgentTool(
        "find",
        "The number of the note that holds a field, if that department has it.",
        {
            "type": "object",
            "properties": {"field": TEXT, "department": TEXT},
            "required": ["field", "department"],
            "additionalProperties": False,
        },
    ),
    AgentTool(
        "read",
        "What a note says.",
        {
            "type": "object",
            "properties": {"note": {"type": "integer"}},
            "required": ["note"],
            "additionalProperties": False,
        },
    ),
    AgentTool(
        "answer",
        "Give the value that was asked for, which ends the case.",
        {
            "type": "object",
            "properties": {"value": TEXT},
            "required": ["value"],
            "additionalProperties": False,
        },
    ),
)
TOOL_NAMES = tuple(tool.name for tool in TOOLS)
MAX_CALL_CHARS = 400

# Hint templates by `DeskReply.hint_key`; `hint_facts` fill them in.
HINTS = {
    "tools": "the tools are find read answer.",
    "form_of_find": "say find {field} in a department.",
    "form_of_read": "say read note and its number.",
    "form_of_answer": "say answer and the value.",
    "where": "the handbook says {field} {department}.",
    "the_note": "read note {note}.",
    "find_first": "find {field} first.",
}

_FORMS: Mapping[str, re.Pattern[str]] = {
    "find": re.compile(r"(?P<field>\S+) in (?P<department>\S+)"),
    "read": re.compile(r"note (?P<note>\d{1,9})"),
    "answer": re.compile(r"(?P<value>.+)"),
}


@dataclass(frozen=True)
class ClinicDesk:
    """Hold a desk: `ClinicDesk("desk_01", (("surgeon", "cardiology"), ("sodium", "urology")))`."""

    id: str
    handbook: tuple[tuple[str, str], ...]

    @property
    def document(self) -> str:
        """Return the handbook as text: `"surgeon cardiology. sodium urology."`"""
        return " ".join(f"{name} {department}." for name, department in self.handbook)


@dataclass(frozen=True)
class DeskCase:
    """Hold one question and the record that answers it, which the tools read."""

    field: str
    department: str
    note: int
    value: str

    @property
    def question(self) -> str:
        return f"what is the {self.field}?"


@dataclass(frozen=True)
class DeskReply:
    """Carry the desk's reply to one call.

    `reward` is set at the end only: 1 for the right value, else 0. A failure has an `error_kind`,
    the `hint_key` of a template that would help, and that template's values in `hint_facts`. Hints
    never contain the value. `question` is the next case's, where this reply ends one of a shift.
    """

    text: str
    done: bool = False
    reward: float | None = None
    error_kind: str = ""
    hint_key: str = ""
    hint_facts: Mapping[str, str] = field(default_factory=dict)
    question: str = ""


@dataclass(frozen=True)
class CaseState:
    """Hold a case after some calls: whether its note was found, and whether it was read."""

    found: bool = False
    read: bool = False
    turns: int = 0
    reply: DeskReply | None = None


@dataclass(frozen=True)
class ShiftState:
    """Hold a shift after some calls: cases ended, how many of them right, the state of the current
    one (after the last: its own), and the desk's reply to the last call."""

    ended: int = 0
    right: int = 0
    case: CaseState = CaseState()
    reply: DeskReply | None = None


def draw_desk(seed: int, index: int, fields: int) -> ClinicDesk:
    """Return desk `index` (from 1) of a seed. Raises DataError for a wrong number of `fields`."""
    if not 1 <= fields <= len(words.FIELDS):
        raise DataError(
            f"a handbook has 1 to {len(words.FIELDS)} fields, those there are: got {fields}; "
            "change data.facts"
        )
    rng = random.Random(f"desk/{seed}/{index}")
    names = rng.sample(words.FIELDS, fields)
    return ClinicDesk(
        f"desk_{index:02d}", tuple((name, rng.choice(words.DEPARTMENTS)) for name in names)
    )


def draw_case(desk: ClinicDesk, seed: int) -> DeskCase:
    """Return the case of a seed at a desk; it is equal in every process."""
    rng = random.Random(f"case/{desk.id}/{seed}")
    name, department = rng.choice(desk.handbook)
    return case_of(name, department, rng)


def draw_shift(desk: ClinicDesk, seed: int, cases: int) -> tuple[DeskCase, ...]:
    """Return a seed's shift of `cases` cases about distinct fields; the first is `draw_case`'s.

    Raises DataError where the handbook has fewer fields.
    """
    if not 1 <= cases <= len(desk.handbook):
        raise DataError(
            f"a shift has 1 to {len(desk.handbook)} cases, the fields of its handbook: got "
            f"{cases}; change episodes.cases or data.facts"
        )
    first = draw_case(desk, seed)
    rng = random.Random(f"shift/{desk.id}/{seed}")
    other_entries = [entry for entry in desk.handbook if entry[0] != first.field]
    return first, *(case_of(*entry, rng) for entry in rng.sample(other_entries, cases - 1))


def case_of(name: str, department: str, rng: random.Random) -> DeskCase:
    """Return a case about this field, with a note and a value drawn from `rng`."""
    value = words.value_text(name, rng.choice(words.CATEGORY_OF[name].values))
    return DeskCase(name, department, rng.randint(10, 99), value)


def call_text(call: ToolAction) -> str:
    """Return a call as a clerk's text, `"find surgeon in cardiology."`, or raise DataError."""
    arguments = {k: " ".join(str(v).split()) for k, v in call.arguments.items()}
    match call.tool, arguments:
        case "find", {"field": name, "department": department}:
            return f"find {name} in {department}."
        case "read", {"note": note}:
            return f"read note {note}."
        case "answer", {"value": value}:
            return f"answer {value}."
    raise DataError(
        f"the desk has no call {call.tool} with {sorted(arguments)}; "
        "see environments.clinic.desk.TOOLS"
    )


def bounded(text: str) -> str:
    """Return the call, or the tool's name alone if it is longer than MAX_CALL_CHARS.

    A name without arguments is bad_arguments; a truncated text could be another valid call.
    """
    if len(text) <= MAX_CALL_CHARS:
        return text
    return next(iter(text.split()), "")[:MAX_CALL_CHARS]


def parse_call(text: str) -> ToolAction:
    """Return the call that a clerk's text makes, whether or not the desk can execute it.

    A text without its tool's form becomes a call with {"words": ...} as arguments: bad_arguments.
    """
    name, _, arguments_text = " ".join(text.split()).removesuffix(".").partition(" ")
    match = _FORMS[name].fullmatch(arguments_text) if name in _FORMS else None
    if match is None:
        return ToolAction(name, {"words": arguments_text})
    arguments: dict[str, str | int] = dict(match.groupdict())
    if name == "read":
        arguments["note"] = int(arguments["note"])
    return ToolAction(name, arguments)


def reply_to(case: DeskCase, state: CaseState, text: str, max_turns: int) -> CaseState:
    """Return the case's state after one more call, with the desk's reply in `reply`."""
    turns = state.turns + 1
    was_found, read, reply = _answered(case, state, parse_call(text))
    if not reply.done and turns >= max_turns:
        reply = DeskReply(
            f"{reply.text} the time is over.", True, 0.0, reply.error_kind, reply.hint_key,
            reply.hint_facts,
        )  # fmt: skip
    return CaseState(was_found, read, turns, reply)


def reply_in_shift(
    cases: Sequence[DeskCase], state: ShiftState, text: str, case_turns: int
) -> ShiftState:
    """Return the shift's state after one more call; every case has at most `case_turns` turns."""
    case = reply_to(cases[state.ended], state.case, text, case_turns)
    assert case.reply is not None
    if not case.reply.done:
        return replace(state, case=case, reply=case.reply)
    ended, right = state.ended + 1, state.right + (case.reply.reward == 1.0)
    if ended < len(cases):
        question = cases[ended].question
        reply = replace(case.reply, done=False, reward=None, question=question)
        return ShiftState(ended, right, CaseState(), reply)
    return ShiftState(ended, right, case, replace(case.reply, reward=float(right == len(cases))))


def _answered(case: DeskCase, state: CaseState, call: ToolAction) -> tuple[bool, bool, DeskReply]:
    is_found, read = state.found, state.read
    if call.tool not in TOOL_NAMES:
        return (
            is_found,
            read,
            DeskReply("no such tool.", error_kind="unknown_tool", hint_key="tools"),
        )
    if "words" in call.arguments:
        facts = {"tool": call.tool, "field": case.field}
        hint = f"form_of_{call.tool}"
        return is_found, read, DeskReply("bad call.", False, None, "bad_arguments", hint, facts)
    arguments = call.arguments
    if call.tool == "find":
        if (arguments["field"], arguments["department"]) == (case.field, case.department):
            return True, read, DeskReply(f"note {case.note}.")
        facts = {"field": case.field, "department": case.department}
        text = f"no {arguments['field']} in {arguments['department']}."
        return is_found, read, DeskReply(text, False, None, "missing_record", "where", facts)
    if call.tool == "read":
        if arguments["note"] == case.note:
            return is_found, True, DeskReply(f"{case.field} {case.value}.")
        hint = "the_note" if is_found else "find_first"
        facts = {"field": case.field, "note": str(case.note)} if is_found else {"field": case.field}
        text = f"no note {arguments['note']}."
        return is_found, read, DeskReply(text, False, None, "missing_record", hint, facts)
    right = str(arguments["value"]).casefold() == case.value.casefold()
    return is_found, read, DeskReply("right." if right else "wrong.", True, float(right))
