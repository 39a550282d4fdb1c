"""Translate OpenAI's Responses API to chats, and answers to its items and events.

    instructions, input items -> messages      tools, text.format -> tools, response_format
    pieces -> response.created, in_progress, (output_item.added, ..., output_item.done) for the
              message and each call, response.completed or response.incomplete

A whole response is what its events add up to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cartridge_forge.plugins.chat.wire.detokenizer import CallPiece, TextPiece
from cartridge_forge.plugins.chat.wire.errors import bad_request, plain_json
from cartridge_forge.plugins.chat.wire.openai_chat import ForgeExtension, TokenUsage
from cartridge_forge.plugins.chat.wire.openai_responses import (
    InputCall,
    InputMessage,
    InputTokenDetails,
    OutputTokenDetails,
    ResponsesNamedTool,
    ResponsesReply,
    ResponsesRequest,
    ResponsesUsage,
)
from cartridge_forge.plugins.serve.apis.translation import ChatFields

Event = dict[str, Any]
RENAMED = {
    "messages": "input", "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema", "response_format": "text.format",
    "tool_choice.function.name": "tool_choice.name",
}  # fmt: skip


def chat_of(body: ResponsesRequest) -> ChatFields:
    """Return the chat that a request is. Raises ApiError 400 for what a reply cannot repeat."""
    try:
        plain_json(body.model_dump(exclude={"input"}))
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the reply cannot repeat the request: {error}", None) from error
    chosen: Any = body.tool_choice
    if isinstance(chosen, ResponsesNamedTool):
        chosen = {"type": "function", "function": {"name": chosen.name}}
    tools = [
        {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_unset=True)}
        for tool in body.tools or ()
    ]
    chat = ChatFields(
        model=body.model, max_tokens=body.max_output_tokens, temperature=body.temperature,
        top_p=body.top_p, seed=body.seed, forge=body.forge, tools=tools or None,
        tool_choice=chosen, parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body),
    )  # fmt: skip
    chat.places = dict(RENAMED)
    chat.places |= {f"tools[{i}].function": f"tools[{i}]" for i in range(len(tools))}
    if body.instructions is not None:
        chat.add("system", body.instructions, "instructions")
    if isinstance(body.input, str):
        chat.add("user", body.input, "input")
        return chat
    for i, item in enumerate(body.input):
        path = f"input[{i}]"
        if isinstance(item, InputMessage):
            chat.add(item.role, _text(item.content), path)
        elif isinstance(item, InputCall):
            chat.call(item.call_id, item.name, item.arguments, path)
        else:
            chat.add("tool", _text(item.output), path, tool_call_id=item.call_id)
    return chat


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _format(body: ResponsesRequest) -> dict[str, Any] | None:
    wanted = body.text.format if body.text else None
    if wanted is None:
        return None
    if wanted.type != "json_schema" and wanted.schema_ is None:
        return {"type": wanted.type}
    schema = {"name": wanted.name or "text"}
    if wanted.schema_ is not None:
        schema["schema"] = wanted.schema_  # type: ignore[assignment]
    return {"type": wanted.type, "json_schema": schema}


class ResponsesWire:
    """Write the reply to one request: its events, and the response that they add up to."""

    def __init__(
        self,
        body: ResponsesRequest,
        head: dict[str, Any],
        token: Callable[[int], tuple[str, list[int]]],
        top: int | None,
    ) -> None:
        self._body, self._head = body, head
        self._serial = head["id"].rpartition("_")[2]
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item that grows, the last of the output
        self._sent = 0
        self._cut = False

    def whole(
        self, pieces: Sequence[TextPiece], usage: TokenUsage, forge: ForgeExtension, **more: Any
    ) -> dict[str, Any]:
        self.chunks(0, pieces[0], forge)
        return self._reply(usage, forge)

    def opening(self, choices: int, usage: TokenUsage) -> list[Event]:
        reply = self._reply(None, None)
        return [
            self._event("response.created", response=reply),
            self._event("response.in_progress", response=reply),
        ]

    def chunks(self, choice: int, piece: TextPiece, forge: ForgeExtension) -> list[Event]:
        events = self._add_text(piece.text) if piece.text else []
        for call in piece.calls:
            events += self._add_call(call)
        if piece.finish_reason is not None:
            self._cut = piece.finish_reason == "length"
            if not self._output:
                events += self._begin_message()
            events += self._end()
        return events

    def closing(self, usage: TokenUsage, forge: ForgeExtension) -> list[Event]:
        reply = self._reply(usage, forge)
        return [self._event(f"response.{reply['status']}", response=reply)]

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}

    def _of_item(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        position = {"item_id": self._open["id"], "output_index": len(self._output) - 1}
        return self._event(f"response.{kind}", **position, **fields)

    def _begin(self, item: dict[str, Any]) -> list[Event]:
        ended = self._end()
        self._output.append(item)
        self._open = item
        added = {"output_index": len(self._output) - 1, "item": dict(item)}
        return [*ended, self._event("response.output_item.added", **added)]

    def _begin_message(self) -> list[Event]:
        events = self._begin(
            {
                "id": f"msg_{self._serial}", "type": "message", "role": "assistant",
                "status": "in_progress", "content": [],
            }
        )  # fmt: skip
        assert self._open is not None
        self._open["content"] = [_part("")]
        part = {"content_index": 0, "part": _part("")}
        return [*events, self._of_item("content_part.added", **part)]

    def _add_text(self, text: str) -> list[Event]:
        events = [] if self._open else self._begin_message()
        assert self._open is not None
        self._open["content"][0]["text"] += text
        delta = {"content_index": 0, "delta": text, "logprobs": []}
        return [*events, self._of_item("output_text.delta", **delta)]

    def _add_call(self, call: CallPiece) -> list[Event]:
        events: list[Event] = []
        if call.name:
            events = self._begin(
                {
                    "id": f"fc_{self._serial}_{call.index}", "type": "function_call",
                    "status": "in_progress", "call_id": call.id, "name": call.name,
                    "arguments": "",
                }
            )  # fmt: skip
        if call.arguments:
            assert self._open is not None
            self._open["arguments"] += call.arguments
            events.append(self._of_item("function_call_arguments.delta", delta=call.arguments))
        return events

    def _end(self) -> list[Event]:
        """End the item that grows, if there is one."""
        if self._open is None:
            return []
        item = self._open
        item["status"] = "incomplete" if self._cut else "completed"
        if item["type"] == "message":
            text = item["content"][0]["text"]
            at = {"content_index": 0}
            events = [
                self._of_item("output_text.done", **at, text=text, logprobs=[]),
                self._of_item("content_part.done", **at, part=_part(text)),
            ]
        else:
            call = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._of_item("function_call_arguments.done", **call)]
        self._open = None
        output = {"output_index": len(self._output) - 1, "item": item}
        return [*events, self._event("response.output_item.done", **output)]

    def _reply(self, usage: TokenUsage | None, forge: ForgeExtension | None) -> dict[str, Any]:
        """Return the response as it is now; without usage it is in progress."""
        body = self._body
        cut = self._cut and usage is not None
        fields = body.model_dump(exclude_unset=True, by_alias=True)
        reply = ResponsesReply(
            id=self._head["id"],
            object="response",
            created_at=self._head["created"],
            status="in_progress" if usage is None else "incomplete" if cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            error=None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._head["model"],
            output=list(self._output),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=None,
            store=False,
            temperature=1.0 if body.temperature is None else body.temperature,
            text=fields.get("text") or {"format": {"type": "text"}},
            tool_choice=fields.get("tool_choice") or "auto",
            tools=fields.get("tools") or [],
            top_p=1.0 if body.top_p is None else body.top_p,
            truncation="disabled",
            usage=None if usage is None else _usage(usage),
            **({} if forge is None else {"forge": forge}),
        )
        return reply.plain()


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: TokenUsage) -> ResponsesUsage:
    return ResponsesUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokenDetails(cached_tokens=0, cache_write_tokens=0),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokenDetails(reasoning_tokens=0),
        total_tokens=usage.total_tokens,
    )
