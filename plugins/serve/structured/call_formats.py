"""Define the forms in which models write calls of tools.

    hermes        <tool_call>\\n{"name": "find", "arguments": {...}}\\n</tool_call>   (Qwen, Hermes)
    llama3_json   {"name": "find", "parameters": {...}}; {...}                      (Llama 3.x)
    desk          find surgeon in cardiology.                     (the clinic desk's tiny clerk)

Each form is written (calls of earlier turns, as text of the assistant), told (where the model's
template does not tell tools), followed (calls that must come, as a grammar) and read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cartridge_forge.plugins.chat.messages import AgentTool, ToolAction
from cartridge_forge.plugins.clinic.desk import TOOLS, call_text
from cartridge_forge.plugins.serve.spec import CallFormatName
from cartridge_forge.plugins.serve.structured.call_reading import (
    CalledTools,
    CallReader,
    MarkedCalls,
    SentenceCalls,
)
from cartridge_forge.protocols.response_rules import ResponseGrammar

# As learning.decoding.grammar has them: a schema's own options cannot change these.
BLANKS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_DESK = {tool.name: tool for tool in TOOLS}


@dataclass(frozen=True)
class CallFormat:
    """Hold one form. `write(name, arguments as JSON)` gives a call's text, `between` stands between
    two; `tell(tools)` gives what the model is told, "" for nothing. `follow(tools, several)` is the
    grammar of one call or several, `beside(tools)` that of any text in which calls follow their
    schemas, None where the form has none. `fault(tool)` says why a tool cannot be called in this
    form, "" where it can. `end` is written behind every call."""

    name: CallFormatName
    between: str
    end: str
    write: Callable[[str, str], str]
    tell: Callable[[Sequence[AgentTool]], str]
    follow: Callable[[Sequence[AgentTool], bool], ResponseGrammar]
    beside: Callable[[Sequence[AgentTool]], ResponseGrammar] | None
    read: Callable[[CalledTools], CallReader]
    fault: Callable[[AgentTool], str] = lambda tool: ""


def schema_of(tool: AgentTool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are an object."""
    return {"type": "object", **tool.parameters} if tool.parameters else dict(ARGUMENTS)


def _json_call(key: str, opening: str, closing: str, name: str, arguments: str) -> str:
    named = json.dumps(name, ensure_ascii=False)
    return f'{opening}{{"name": {named}, "{key}": {arguments}}}{closing}'


def _one_of(key: str, tools: Sequence[AgentTool]) -> list[str]:
    """Return the rules of Lark for `object`, the JSON of one call."""
    rules = ["object: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
        schema = json.dumps({**schema_of(tool), "x-guidance": BLANKS})
        rules += [f'call_{i}: {head} arguments_{i} "}}"', f"arguments_{i}: %json {schema}"]
    return rules


def _follow_json(
    key: str, opening: str, closing: str, between: str, tools: Sequence[AgentTool], several: bool
) -> ResponseGrammar:
    start = f"start: call ({json.dumps(between)} call)*" if several else "start: call"
    marked = [json.dumps(mark) for mark in (opening, closing)]
    call = " ".join([*marked[:1], "object", *marked[1:]]) if opening else "object"
    return ResponseGrammar("lark", "\n".join([start, f"call: {call}", *_one_of(key, tools)]))


def _hermes_beside(tools: Sequence[AgentTool]) -> ResponseGrammar:
    rules = [
        "start: call* TEXT",
        "TEXT: /(?s:.*)/ & ~/(?s:.*<tool_call>.*)/",
        "before[lazy]: /(?s:.*)<tool_call>\\n/",
        f"call: before object {json.dumps(HERMES_MARKS[1])}",
    ]
    return ResponseGrammar("lark", "\n".join([*rules, *_one_of("arguments", tools)]))


def _tell_json(key: str, example: str, tools: Sequence[AgentTool]) -> str:
    listed = "\n".join(
        json.dumps(
            {"name": t.name, "description": t.description, "parameters": schema_of(t)},
            ensure_ascii=False,
        )
        for t in tools
    )
    return (
        f"You can call these functions. Each line is one of them, with the JSON schema of its "
        f"{key}:\n<tools>\n{listed}\n</tools>\nTo call a function, write its name and its {key} as "
        f"JSON in this form:\n{example}"
    )


def _desk_fault(tool: AgentTool) -> str:
    commands = _DESK.get(tool.name)
    if commands is None:
        return f"this model calls {', '.join(_DESK)} alone (tool_calls: desk)"
    named = sorted(_properties(tool))
    if named != sorted(commands.parameters["properties"]):
        wanted = ", ".join(sorted(commands.parameters["properties"]))
        return f"this model's {tool.name} has the arguments {wanted}"
    return ""


def _properties(tool: AgentTool) -> Mapping[str, Any]:
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def _write_desk(name: str, arguments: str) -> str:
    return call_text(ToolAction(name, json.loads(arguments)))


def _follow_desk(tools: Sequence[AgentTool], several: bool) -> ResponseGrammar:
    """Return the sentences of the tools, with the values that their schemas list or a word of any
    kind; the desk's clerk makes one call at a time."""
    rules = ["start: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        rules.append(f"call_{i}: {_desk_sentence(tool)}")
    return ResponseGrammar("lark", "\n".join([*rules, "WORD: /[^ .\\n]+/", "NUMBER: /[0-9]{1,9}/"]))


def _desk_sentence(tool: AgentTool) -> str:
    properties = _properties(tool)
    marks = {name: f"\0{name}\0" for name in _DESK[tool.name].parameters["properties"]}
    parts = call_text(ToolAction(tool.name, marks)).split("\0")
    # The clerk's first word follows a blank, as its tokenizer writes one before every text.
    sentences = [
        _value(properties.get(part), _DESK[tool.name].parameters["properties"][part])
        if part in marks
        else json.dumps(part)
        for part in parts
        if part
    ]
    return " ".join(['" "?', *sentences])


def _value(schema: Any, value_schema: Mapping[str, Any]) -> str:
    listed = schema.get("enum") if isinstance(schema, dict) else None
    if listed and all(isinstance(value, str | int) for value in listed):
        return "(" + " | ".join(json.dumps(str(value)) for value in listed) + ")"
    return "NUMBER" if value_schema["type"] == "integer" else "WORD"


HERMES_MARKS = ("<tool_call>\n", "\n</tool_call>")
HERMES = CallFormat(
    "hermes", "\n", "</tool_call>",
    write=partial(_json_call, "arguments", *HERMES_MARKS),
    tell=partial(
        _tell_json, "arguments", _json_call("arguments", *HERMES_MARKS, "NAME", "{ARGUMENTS}")
    ),
    follow=partial(_follow_json, "arguments", *HERMES_MARKS, "\n"),
    beside=_hermes_beside,
    read=lambda tools: MarkedCalls(tools, "<tool_call>", "</tool_call>"),
)  # fmt: skip
LLAMA3_JSON = CallFormat(
    "llama3_json", "; ", "",
    write=partial(_json_call, "parameters", "", ""),
    tell=partial(
        _tell_json, "parameters",
        _json_call("parameters", "", "", "NAME", "{PARAMETERS}") + "\nand nothing beside it",
    ),
    follow=partial(_follow_json, "parameters", "", "", "; "),
    beside=None,
    read=lambda tools: MarkedCalls(tools, "", ""),
)  # fmt: skip
DESK = CallFormat(
    "desk", " ", "",
    write=_write_desk, tell=lambda tools: "", follow=_follow_desk, beside=None,
    read=SentenceCalls, fault=_desk_fault,
)  # fmt: skip
FORMATS: Mapping[CallFormatName, CallFormat] = {f.name: f for f in (HERMES, LLAMA3_JSON, DESK)}


def format_of(tokenizer: Any) -> CallFormat | None:
    """Return the form in which the tokenizer's chat template writes calls; None for another or
    none."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    chat = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    try:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False))
    except Exception:  # a template may fail in any way: it then writes no calls
        return None
    return next((f for f in (HERMES, LLAMA3_JSON) if f.write("f", '{"a": 1}') in text), None)


def text_with_calls(form: CallFormat, content: str, calls: Sequence[tuple[str, str]]) -> str:
    """Return an assistant's message with its calls, names and arguments, as the model would write
    it. Raises DataError for a call that the form has no text for."""
    calls_text = form.between.join(form.write(name, arguments) for name, arguments in calls)
    return f"{content}{form.between}{calls_text}" if content else calls_text
