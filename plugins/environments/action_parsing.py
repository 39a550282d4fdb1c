"""Convert a student's text to an action, and an action to the text that would make it.

DESK   find surgeon in cardiology.
JSON   {"arguments":{"field":"surgeon","department":"cardiology"},"tool":"find"}

`action_in` makes an environment's action of a text:

text   go left                                    "go left"
json   I push. {"move": "left"}                   {"move": "left"}
tool   {"tool": "add", "arguments": {"a": 1}}     ToolAction("add", {"a": 1})
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from cartridge_forge.plugins.chat.episodes import Observation
from cartridge_forge.plugins.chat.messages import (
    Action,
    AgentMessage,
    AgentTool,
    OptionAction,
    TextAction,
    ToolAction,
)
from cartridge_forge.plugins.chat.wire.foreign import value_of
from cartridge_forge.plugins.clinic.desk import call_text, parse_call
from cartridge_forge.plugins.replay.actions import dense
from cartridge_forge.protocols.errors import DataError

END_OF_THINKING = "</think>"


@dataclass(frozen=True)
class ActionFormat:
    """Hold one text format of actions. `parse` accepts any text; `say` raises DataError for an
    action that the format cannot express."""

    parse: Callable[[str], Action]
    say: Callable[[Action], str]


def _say_at_desk(action: Action) -> str:
    if not isinstance(action, ToolAction):
        raise DataError(f"the desk's format expresses tool calls only: got {action}")
    return call_text(action)


def _parse_json(text: str) -> Action:
    """Return the first call after the thinking block, or the text itself when it has no call. Chat
    templates of others name the tool "name"."""
    for value in objects_in(text):
        match value:
            case {"tool": str(tool), "arguments": dict(arguments)}:
                return ToolAction(tool, arguments)
            case {"name": str(tool), "arguments": dict(arguments)}:
                return ToolAction(tool, arguments)
    return TextAction(_said(text).strip())


def objects_in(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects after the thinking block, also those inside others."""
    cleaned = _said(text)
    at = cleaned.find("{")
    while at >= 0:
        try:
            value, _ = _DECODER.raw_decode(cleaned, at)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            yield value
        at = cleaned.find("{", at + 1)


def _said(text: str) -> str:
    return text.rpartition(END_OF_THINKING)[2]


def _say_json(action: Action) -> str:
    match action:
        case ToolAction(tool, arguments):
            return dense({"tool": tool, "arguments": dict(arguments)})
        case OptionAction(option):
            return option
        case TextAction(text):
            return text


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is too large")
    return number


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)

DESK = ActionFormat(parse_call, _say_at_desk)
JSON = ActionFormat(_parse_json, _say_json)


ActionForm = Literal["text", "json", "tool"]
BAD_ACTION = "bad_action"  # the error kind of a text that is no action


class NoAction(Exception):
    """Signal a text that is no action in the environment's form; says what one looks like."""


def action_in(text: str, form: ActionForm) -> Any:
    """Return the text without its thinking block, the first JSON object in it as a mapping, or its
    first tool call as a ToolAction. Raises NoAction where there is none."""
    if form == "text":
        return text.rpartition(END_OF_THINKING)[2].strip()
    if form == "json":
        value = next(objects_in(text), None)
        if value is None:
            raise NoAction('no JSON object in this text. write one, such as {"field": "value"}')
        return value
    call = JSON.parse(text)
    if not isinstance(call, ToolAction):
        raise NoAction('no tool call in this text. write one as {"tool": NAME, "arguments": {..}}')
    return call


def with_tools_shown(opening: Observation, where: Literal["template", "message"]) -> Observation:
    """Return the opening as the student reads it: with `message`, its tools are at the end of its
    first message, one JSON line each, and no longer the chat template's."""
    if where == "template" or not opening.tools:
        return opening
    lines = [
        json.dumps({"tool": t.name, "about": t.description, "arguments": _types(t)})
        for t in opening.tools
    ]
    text = "\n".join(["tools:", *lines])
    first, *later = opening.messages or (AgentMessage("user", ""),)
    message = replace(first, content=f"{first.content}\n{text}".strip())
    return replace(opening, messages=(message, *later), tools=())


def _types(tool: AgentTool) -> dict[str, Any]:
    properties = tool.parameters.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: value_of(about, "type") or "any" for name, about in properties.items()}
