"""Write chat completions as OpenAI's clients read them: one body, or a stream's events."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from cartridge_forge.plugins.chat.messages import TeacherUsage


@dataclass(frozen=True)
class FunctionCall:
    """Hold a call of a tool: `FunctionCall("call_1", "find", '{"field":"pulse"}')`."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ChatReply:
    """Hold an assistant's text or its refusal. `cut`: the token limit ended it. With `calls`, those
    are sent and no text."""

    text: str
    refused: bool
    cut: bool
    usage: TeacherUsage
    calls: tuple[FunctionCall, ...] = ()


def write_completion(model: str, reply: ChatReply, serial: int) -> dict[str, Any]:
    """Return the whole body; `serial` is part of its id."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    message |= {"tool_calls": _calls(reply)} if reply.calls else {_field(reply): reply.text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(reply)}
    head = _head("chat.completion", model, serial)
    return {**head, "choices": [choice], "usage": _usage(reply.usage)}


def write_events(model: str, reply: ChatReply, serial: int, include_usage: bool) -> list[bytes]:
    """Return a completion as server-sent events, one word each."""
    deltas: list[dict[str, Any]] = [{"role": "assistant"}]
    if reply.calls:
        deltas.append({"tool_calls": [{"index": i, **c} for i, c in enumerate(_calls(reply))]})
    else:
        deltas += [{_field(reply): word} for word in words_of(reply.text)]
    ends: list[str | None] = [*(None for _ in deltas), _reason(reply)]
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": end}]}
        for delta, end in zip([*deltas, {}], ends, strict=True)
    ]
    if include_usage:
        chunks.append({"choices": [], "usage": _usage(reply.usage)})
    head = _head("chat.completion.chunk", model, serial)
    events = [json.dumps({**head, **chunk}) for chunk in chunks]
    return [f"data: {event}\n\n".encode() for event in [*events, "[DONE]"]]


def write_error(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error response with this HTTP status."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, "api_error")
    return {"error": {"type": kind, "message": message}}


def words_of(text: str) -> list[str]:
    """Split a text into words, each with the blanks behind it; joined they are the text."""
    return re.findall(r"\S+\s*|\s+", text) or [""]


def _field(reply: ChatReply) -> str:
    return "refusal" if reply.refused else "content"


def _calls(reply: ChatReply) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in reply.calls
    ]


def _head(kind: str, model: str, serial: int) -> dict[str, Any]:
    return {"id": f"chatcmpl-{serial}", "object": kind, "created": 0, "model": model}


def _reason(reply: ChatReply) -> str:
    return "tool_calls" if reply.calls else "length" if reply.cut else "stop"


def _usage(usage: TeacherUsage) -> dict[str, Any]:
    read = usage.input_tokens + usage.cached_tokens
    return {
        "prompt_tokens": read,
        "completion_tokens": usage.output_tokens,
        "total_tokens": read + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
