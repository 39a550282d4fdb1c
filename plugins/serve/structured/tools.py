"""Read a chat's tools: what is offered, which calls must come, and calls of earlier turns.

tools, tool_choice, parallel_tool_calls -> ToolOffer: what the model is told, and what it must
                                           write, if anything
messages                                -> AgentMessage, calls written in the model's own form
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from cartridge_forge.plugins.chat.messages import AgentMessage, AgentTool
from cartridge_forge.plugins.chat.wire.errors import ApiError, bad_request
from cartridge_forge.plugins.chat.wire.openai_chat import ChatMessage, ChatRequest
from cartridge_forge.plugins.chat.wire.openai_tools import NamedTool, SentCall, agent_tools
from cartridge_forge.plugins.decoding.grammar import Grammars, json_depth
from cartridge_forge.plugins.serve.structured.call_formats import (
    CallFormat,
    schema_of,
    text_with_calls,
)
from cartridge_forge.plugins.serve.structured.grammars import check, schema_grammar
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.response_rules import (
    MAX_GRAMMAR_BYTES,
    MAX_GRAMMAR_DEPTH,
    ResponseGrammar,
)


@dataclass(frozen=True)
class ToolOffer:
    """Hold the tools that the model is told, the form of its calls, `most` of them (None: any
    number), and the grammar that its responses follow, None for any text."""

    tools: tuple[AgentTool, ...]
    form: CallFormat
    most: int | None
    grammar: ResponseGrammar | None


def offer_of(body: ChatRequest, form: CallFormat, grammars: Grammars) -> ToolOffer | None:
    """Return the tools of a request, None for none. Raises ApiError 400 with the field."""
    tools = agent_tools(body.tools or ())
    for i, tool in enumerate(tools):
        _check_tool(tool, [t.name for t in tools[:i]], form, f"tools[{i}].function")
    size = sum(len(json.dumps(schema_of(tool))) for tool in tools)
    if size > MAX_GRAMMAR_BYTES:
        raise bad_request(
            f"the schemas of the tools have {size} bytes together, and {MAX_GRAMMAR_BYTES} are "
            "allowed; offer fewer, or simpler ones",
            "tools",
        )
    choice = body.tool_choice or "auto"
    if not tools and choice not in ("none", "auto"):
        raise bad_request("tool_choice asks for a call, and no tools are given", "tool_choice")
    if not tools or choice == "none":
        return None
    several = body.parallel_tool_calls is not False
    called, param = list(tools), "tools"
    if isinstance(choice, NamedTool):
        called = [tool for tool in tools if tool.name == choice.function.name]
        several, param = False, "tool_choice"
        if not called:
            raise bad_request(
                f"tool_choice names {choice.function.name}, which is none of the tools; name one "
                "of them",
                "tool_choice.function.name",
            )
    grammar = None
    if choice != "auto":
        grammar = form.follow(called, several)
    elif any(tool.function.strict for tool in body.tools or ()):
        if form.beside is None:
            raise bad_request(
                "strict is followed with tool_choice required or a named tool: a model that "
                f"writes calls as {form.name} marks none among other text; leave it out",
                "tools",
            )
        grammar = form.beside(called)
    if grammar is not None:
        _check_grammar(grammar, tools, called, grammars, param)
    return ToolOffer(tools, form, None if several else 1, grammar)


def messages_of(messages: Sequence[ChatMessage], form: CallFormat) -> tuple[AgentMessage, ...]:
    """Return a chat as the model reads it. Raises ApiError 400 for calls of another role than the
    assistant's, arguments that are no JSON object, and a result of a call that was not made."""
    read: list[AgentMessage] = []
    called: set[str] = set()
    for i, message in enumerate(messages):
        path, calls = f"messages[{i}]", message.tool_calls or ()
        if calls and message.role != "assistant":
            raise bad_request(
                f"{path}.tool_calls belong to the role assistant", f"{path}.tool_calls"
            )
        if message.role == "tool" and called and message.tool_call_id not in called:
            raise bad_request(
                f"{path}.tool_call_id is {json.dumps(message.tool_call_id)}, which is the id of "
                "no call before it; send the assistant's message with its tool_calls first",
                f"{path}.tool_call_id",
            )
        converted = [
            _told(call, f"{path}.tool_calls[{n}].function") for n, call in enumerate(calls)
        ]
        called |= {call.id for call in calls}
        text = message.text
        if converted:
            try:
                text = text_with_calls(form, text, converted)
            except DataError as error:
                raise bad_request(f"{path}.tool_calls: {error}", f"{path}.tool_calls") from error
        read.append(AgentMessage(message.speaker, text))
    return tuple(read)


def _told(call: SentCall, path: str) -> tuple[str, str]:
    """Return the name and the arguments of an earlier call, checked."""
    arguments = call.function.arguments.strip() or "{}"
    try:
        plain = json.loads(arguments)
    except (ValueError, RecursionError):
        plain = None
    if not isinstance(plain, dict):
        raise bad_request(
            f"{path}.arguments is no JSON object, written as a string; send what the call had",
            f"{path}.arguments",
        )
    return call.function.name, arguments


def _check_tool(tool: AgentTool, names: Sequence[str], form: CallFormat, path: str) -> None:
    if tool.name in names:
        raise bad_request(
            f"{path}.name is there twice; give each tool a name of its own", f"{path}.name"
        )
    if tool.parameters.get("type", "object") != "object":
        raise bad_request(
            f"{path}.parameters describes arguments, which are an object: its type is object",
            f"{path}.parameters.type",
        )
    if json_depth(dict(tool.parameters)) > MAX_GRAMMAR_DEPTH:
        raise bad_request(
            f"{path}.parameters has parts that are more than {MAX_GRAMMAR_DEPTH} deep inside each "
            "other; flatten it, or name parts in $defs",
            f"{path}.parameters",
        )
    if why := form.fault(tool):
        raise bad_request(f"{path}: {why}; leave it out", path, "unsupported")


def _check_grammar(
    grammar: ResponseGrammar,
    tools: Sequence[AgentTool],
    called: Sequence[AgentTool],
    grammars: Grammars,
    param: str,
) -> None:
    """Compile a grammar. Raises ApiError 400 that names the schema, and its part, at fault."""
    try:
        check(grammars, grammar, param)
    except ApiError:
        for i, tool in enumerate(tools):
            if tool in called:
                check(grammars, schema_grammar(schema_of(tool)), f"tools[{i}].function.parameters")
        raise
