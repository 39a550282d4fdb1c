"""Convert replies of OpenEnv servers, whose observation fields differ, to Observations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

from cartridge_forge.plugins.chat.episodes import Observation
from cartridge_forge.plugins.chat.messages import AgentMessage, AgentTool, Role
from cartridge_forge.plugins.chat.wire.foreign import number

TEXT_KEYS = ("text", "content")
SCHEMA_KEYS = ("parameters", "input_schema", "inputSchema")
MOST_REWARD = 1e15  # a square of it is a number in float32 too
ROLES: tuple[Role, ...] = get_args(Role)


def observed(data: Mapping[str, Any], opening: bool, text_key: str | None = None) -> Observation:
    """Return a reply's `data`, {"observation", "reward", "done", "metadata"}, as an Observation.

    The text is that of `text_key`, a field's name or a template of fields. Without it the messages
    are under "messages"; else one text is under "text" or "content" or is the only text field;
    else all of the observation, as JSON, is the message. A text without a role is a user message at
    the opening and a tool message after it. All of "messages" count as new. A reward before `done`
    is dropped (`reward_of` returns it). Raises ValueError for a field of `text_key` that is not
    there.
    """
    payload = data.get("observation")
    fields: Mapping[str, Any] = payload if isinstance(payload, dict) else {"text": _text(payload)}
    metadata = data.get("metadata") or fields.get("metadata")
    marks: Mapping[str, Any] = metadata if isinstance(metadata, dict) else {}
    facts = marks.get("hint_facts")
    is_done = bool(data.get("done"))
    return Observation(
        messages=_messages(fields, "user" if opening else "tool", text_key),
        tools=_tools(fields.get("tools")),
        done=is_done,
        reward=reward_of(data) if is_done else None,
        error_kind=_text(marks.get("error_kind")) or _failure_of(fields),
        hint_key=_text(marks.get("hint_template_key")),
        hint_facts={k: _text(v) for k, v in facts.items()} if isinstance(facts, dict) else {},
        expected=_text(marks["expected"]) if is_done and "expected" in marks else None,
        new_conversation=marks.get("new_conversation") is True,
    )


def reward_of(data: Mapping[str, Any]) -> float | None:
    """Return a reply's reward; None where it has none, or one beyond MOST_REWARD."""
    reward = data.get("reward")
    return float(reward) if isinstance(reward, bool) else number(reward, -MOST_REWARD, MOST_REWARD)


def called(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the reply to a tool call of RFC 003 with the tool's text as its observation's
    "text"; any other reply unchanged."""
    fields = data.get("observation")
    if not isinstance(fields, dict) or "tool_name" not in fields:
        return data
    error, result = fields.get("error"), fields.get("result")
    text = _text(error.get("message")) if isinstance(error, dict) else _result_text(result)
    remaining = {k: v for k, v in fields.items() if k not in ("tool_name", "result")}
    return {**data, "observation": {**remaining, "text": text}}


def _result_text(result: Any) -> str:
    """Return the text of a tool's result: MCP wraps it as content, or as data."""
    if isinstance(result, dict):
        if result.get("data") is not None:
            return _text(result["data"])
        if isinstance(result.get("content"), list):
            parts = [part.get("text") for part in result["content"] if isinstance(part, dict)]
            return "\n".join(part for part in parts if isinstance(part, str))
    return _text(result)


def _failure_of(fields: Mapping[str, Any]) -> str:
    """Return the kind of a tool call's failure, as RFC 003 has it; "" where it did not fail."""
    error = fields.get("error")
    return _text(error.get("error_type")) if isinstance(error, dict) else ""


def _shown(fields: Mapping[str, Any], text_key: str) -> str:
    if "{" not in text_key:
        if text_key not in fields:
            raise ValueError(f"its observation has no field {text_key}, but {', '.join(fields)}")
        return _text(fields[text_key])
    try:
        return text_key.format_map({name: _text(value) for name, value in fields.items()})
    except (LookupError, ValueError, AttributeError) as error:
        raise ValueError(
            f"its observation has no {error} of the template, but {', '.join(fields)}"
        ) from error


def _messages(
    fields: Mapping[str, Any], role: Role, text_key: str | None
) -> tuple[AgentMessage, ...]:
    if text_key is not None:
        return (AgentMessage(role, _shown(fields, text_key)),)
    messages = fields.get("messages")
    if isinstance(messages, list):
        return tuple(_message(message, role) for message in messages)
    for key in TEXT_KEYS:
        if isinstance(fields.get(key), str):
            return (AgentMessage(role, fields[key]),)
    remaining = {k: v for k, v in fields.items() if k not in ("metadata", "tools")}
    texts = [v for v in remaining.values() if isinstance(v, str)]
    return (AgentMessage(role, texts[0] if len(texts) == 1 else _text(remaining)),)


def _message(value: Any, role: Role) -> AgentMessage:
    if not isinstance(value, dict):
        return AgentMessage(role, _text(value))
    named = value.get("role")
    content = value.get("content")
    if isinstance(content, list):  # a list of parts; only texts are read
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(part for part in parts if isinstance(part, str))
    return AgentMessage(named if named in ROLES else role, _text(content))


def _tools(value: Any) -> tuple[AgentTool, ...]:
    listed = [tool for tool in value if isinstance(tool, dict)] if isinstance(value, list) else []
    bare = [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in listed]
    return tuple(
        AgentTool(_text(tool["name"]), _text(tool.get("description")), _schema(tool))
        for tool in bare
        if "name" in tool
    )


def _schema(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    schemas = (tool[key] for key in SCHEMA_KEYS if isinstance(tool.get(key), dict))
    return next(schemas, {"type": "object"})


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
