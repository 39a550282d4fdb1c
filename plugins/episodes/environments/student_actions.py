"""Make an environment's action of a student's text.

text   go left                                    "go left"
json   I push. {"move": "left"}                   {"move": "left"}
tool   {"tool": "add", "arguments": {"a": 1}}     ToolAction("add", {"a": 1})
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal

from cartridge_forge.plugins.episodes.environments.action_parsing import (
    END_OF_THINKING,
    JSON,
    objects_in,
)
from cartridge_forge.protocols.episodes import Observation
from cartridge_forge.protocols.foreign import value_of
from cartridge_forge.protocols.teacher_replay import AgentMessage, AgentTool, ToolAction

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
