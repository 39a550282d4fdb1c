"""Translate Anthropic's Messages API to chats, and answers to its blocks and events.

    system, messages with blocks -> messages
    tools, output_config.format  -> tools, response_format
    pieces -> message_start, (content_block_start, content_block_delta, content_block_stop) for the
              text and each call, message_delta, message_stop

A whole message is what its events add up to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from cartridge_forge.plugins.chat.wire.anthropic_messages import (
    MessagesReply,
    MessagesRequest,
    MessagesUsage,
    SentMessage,
    TextBlock,
    ToolUseBlock,
)
from cartridge_forge.plugins.chat.wire.detokenizer import CallPiece, TextPiece
from cartridge_forge.plugins.chat.wire.errors import bad_request, plain_json
from cartridge_forge.plugins.chat.wire.openai_chat import ForgeExtension, TokenUsage
from cartridge_forge.plugins.serve.apis.translation import ChatFields

Event = dict[str, Any]
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
RENAMED = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format", "tool_choice.function.name": "tool_choice.name",
    "stop": "stop_sequences",
}  # fmt: skip


def chat_of(body: MessagesRequest) -> ChatFields:
    """Return the chat that a request is. Raises ApiError 400 for one that ends in an answer."""
    if body.messages[-1].role == "assistant":
        raise bad_request(
            "the last message is the assistant's, and no answer is gone on with; end with the "
            "user's",
            f"messages[{len(body.messages) - 1}].role",
        )
    chosen: Any = None
    if (choice := body.tool_choice) is not None:
        if (choice.type == "tool") != (choice.name is not None):
            raise bad_request(
                "tool_choice.name belongs to the type tool, which needs it", "tool_choice.name"
            )
        named = {"type": "function", "function": {"name": choice.name}}
        chosen = named if choice.name else CHOICES[choice.type]
    chat = ChatFields(
        model=body.model, max_tokens=body.max_tokens, temperature=body.temperature,
        top_p=body.top_p, top_k=body.top_k, seed=body.seed, forge=body.forge,
        stop=body.stop_sequences or None, tools=_tools(body), tool_choice=chosen,
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        response_format=_format(body),
    )  # fmt: skip
    chat.places = dict(RENAMED)
    for i in range(len(body.tools or ())):
        chat.places[f"tools[{i}].function"] = f"tools[{i}]"
        chat.places[f"tools[{i}].function.parameters"] = f"tools[{i}].input_schema"
    if body.system is not None:
        chat.add("system", _text(body.system), "system")
    for i, message in enumerate(body.messages):
        _add(chat, message, f"messages[{i}]")
    return chat


def _tools(body: MessagesRequest) -> list[dict[str, Any]] | None:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name, "description": tool.description,
                "parameters": tool.input_schema, "strict": tool.strict,
            },
        }
        for tool in body.tools or ()
    ] or None  # fmt: skip


def _format(body: MessagesRequest) -> dict[str, Any] | None:
    wanted = body.output_config.format if body.output_config else None
    if wanted is None:
        return None
    schema = {"name": "text", "schema": wanted.schema_}
    return {"type": "json_schema", "json_schema": schema}


def _add(chat: ChatFields, message: SentMessage, path: str) -> None:
    """Add a message: its text, its calls, and one message for each result of a call."""
    if isinstance(message.content, str):
        chat.add(message.role, message.content, path)
        return
    texts = [block.text for block in message.content if isinstance(block, TextBlock)]
    if message.role == "assistant":
        chat.add("assistant", "".join(texts) or None, path)
    for i, block in enumerate(message.content):
        at = f"{path}.content[{i}]"
        if isinstance(block, TextBlock):
            continue
        calls = isinstance(block, ToolUseBlock)
        if calls != (message.role == "assistant"):
            kind, role = ("tool_use", "assistant") if calls else ("tool_result", "user")
            raise bad_request(f"{at}: a {kind} belongs to the role {role}", f"{at}.type")
        if isinstance(block, ToolUseBlock):
            arguments = json.dumps(block.input, ensure_ascii=False)
            chat.call(block.id, block.name, arguments, at)
        else:
            result = _text(block.content or "")
            content = f"error: {result}" if block.is_error else result
            chat.add("tool", content, at, tool_call_id=block.tool_use_id)
    if message.role == "user" and (texts or not message.content):
        chat.add("user", "".join(texts), path)


def _input(text: str) -> dict[str, Any]:
    """Return a call's arguments; {} for text that is no JSON object, as where a call was cut."""
    try:
        value = json.loads(text)
        plain_json(value)  # numbers that JSON has no text for: NaN, 1e999
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class MessagesWire:
    """Write the reply to one request: its events, and the message that they add up to."""

    def __init__(
        self, head: dict[str, Any], token: Callable[[int], tuple[str, list[int]]], top: int | None
    ) -> None:
        self._head = head
        self._blocks: list[dict[str, Any]] = []
        self._said = ""  # the JSON of the last block's input
        self._open = False
        self._last: TextPiece | None = None

    def whole(
        self, pieces: Sequence[TextPiece], usage: TokenUsage, forge: ForgeExtension, **more: Any
    ) -> dict[str, Any]:
        self.chunks(0, pieces[0], forge)
        return self._reply(usage, forge)

    def opening(self, choices: int, usage: TokenUsage) -> list[Event]:
        return [{"type": "message_start", "message": self._reply(usage, None)}]

    def chunks(self, choice: int, piece: TextPiece, forge: ForgeExtension) -> list[Event]:
        events = self._add_text(piece.text) if piece.text else []
        for call in piece.calls:
            events += self._add_call(call)
        if piece.finish_reason is not None:
            self._last = piece
            events += self._end()
        return events

    def closing(self, usage: TokenUsage, forge: ForgeExtension) -> list[Event]:
        reply = self._reply(usage, forge)
        delta = {name: reply[name] for name in ("stop_reason", "stop_sequence")}
        ended = {"delta": delta, "usage": reply["usage"], "forge": reply["forge"]}
        return [{"type": "message_delta", **ended}, {"type": "message_stop"}]

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        ended = self._end()
        self._blocks.append(block)
        self._open = True
        return [*ended, self._event("content_block_start", content_block=dict(block))]

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}

    def _add_text(self, text: str) -> list[Event]:
        events = [] if self._open else self._begin({"type": "text", "text": ""})
        self._blocks[-1]["text"] += text
        delta = {"type": "text_delta", "text": text}
        return [*events, self._event("content_block_delta", delta=delta)]

    def _add_call(self, call: CallPiece) -> list[Event]:
        events: list[Event] = []
        if call.name:
            events = self._begin(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            )
            self._said = ""
        if call.arguments:
            self._said += call.arguments
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            events.append(self._event("content_block_delta", delta=delta))
        return events

    def _end(self) -> list[Event]:
        """End the block that grows, if there is one."""
        if not self._open:
            return []
        self._open = False
        if self._blocks[-1]["type"] == "tool_use":
            self._blocks[-1]["input"] = _input(self._said)
        return [self._event("content_block_stop")]

    def _reply(self, usage: TokenUsage, forge: ForgeExtension | None) -> dict[str, Any]:
        last = self._last
        reason: Any = None if last is None else REASONS[last.finish_reason or "stop"]
        stop = None if last is None else last.stop
        reply = MessagesReply(
            id=self._head["id"],
            type="message",
            role="assistant",
            model=self._head["model"],
            content=list(self._blocks),
            stop_reason="stop_sequence" if stop is not None else reason,
            stop_sequence=stop,
            usage=MessagesUsage(
                input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens,
                cache_creation_input_tokens=0, cache_read_input_tokens=0,
            ),
            **({} if forge is None else {"forge": forge}),
        )  # fmt: skip
        return reply.plain()
