"""The wire formats of the local provider: chat completions, responses, and messages.

/v1/chat/completions   OpenAI's, streaming too
/v1/responses          OpenAI's newer one, whole answers only
/v1/messages           Anthropic's, streaming too
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from protocols.replay import Usage

Wire = Literal["chat", "responses", "messages"]
PATHS: dict[str, Wire] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


@dataclass(frozen=True)
class Asked:
    """A request as the provider's rule sees it: whichever wire it came over, the same."""

    wire: Wire
    model: str
    system: str
    user: str
    max_tokens: int
    stream: bool
    include_usage: bool


@dataclass(frozen=True)
class Called:
    """A call of a tool, as chat completions have it: `arguments` is JSON as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Answered:
    """What is to be said: words or a refusal, and whether they were cut at `max_tokens`. With
    `calls` (chat completions alone) those are said, and no words."""

    text: str
    refused: bool
    cut: bool
    usage: Usage
    calls: tuple[Called, ...] = ()


def read_request(wire: Wire, body: bytes) -> Asked:
    """Raises ValueError for what is no request of this wire."""
    plain = json.loads(body)
    if not isinstance(plain, dict) or not isinstance(plain.get("model"), str):
        raise ValueError("a request names its model")
    turns = plain.get("input" if wire == "responses" else "messages") or []
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    system = [_text(plain.get("system") or plain.get("instructions") or "")]
    system += [_text(t["content"]) for t in turns if t["role"] in ("system", "developer")]
    user = [_text(t["content"]) for t in turns if t["role"] not in ("system", "developer")]
    limit = int([*(plain[k] for k in LIMITS if k in plain), 4096][0])
    options = plain.get("stream_options") or {}
    return Asked(
        wire, plain["model"], "\n".join(filter(None, system)), "\n".join(user), limit,
        bool(plain.get("stream")), bool(options.get("include_usage")),
    )  # fmt: skip


def write_answer(asked: Asked, said: Answered, serial: int) -> bytes:
    """The whole body."""
    write = {"chat": _chat, "responses": _response, "messages": _message}[asked.wire]
    return json.dumps(write(asked, said, serial)).encode()


def write_stream(asked: Asked, said: Answered, serial: int) -> list[bytes]:
    """Server-sent events, a few words each."""
    words = said.text.split(" ")
    pieces = [w if i == 0 else f" {w}" for i, w in enumerate(words)]
    if asked.wire == "messages":
        return _message_events(asked, said, serial, pieces)
    return _chat_chunks(asked, said, serial, pieces)


def write_error(wire: Wire, status: int, message: str) -> bytes:
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, "api_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    whole = {"type": "error", "error": error} if wire == "messages" else {"error": error}
    return json.dumps(whole).encode()


def _text(content: Any) -> str:
    """Content is words, or a list of blocks with some."""
    if isinstance(content, str):
        return content
    return "".join(str(block.get("text", "")) for block in content)


def _chat(asked: Asked, said: Answered, serial: int) -> Mapping[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if said.refused or said.calls else said.text,
        "refusal": said.text if said.refused else None,
    }
    if said.calls:
        message["tool_calls"] = _chat_calls(said)
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": _chat_reason(said),
    }
    return {
        "id": f"chatcmpl-{serial}",
        "object": "chat.completion",
        "created": 0,
        "model": asked.model,
        "choices": [choice],
        "usage": _chat_usage(said.usage),
    }


def _chat_reason(said: Answered) -> str:
    return "tool_calls" if said.calls else "length" if said.cut else "stop"


def _chat_calls(said: Answered) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in said.calls
    ]


def _chat_usage(usage: Usage) -> Mapping[str, Any]:
    read = usage.input_tokens + usage.cached_tokens
    return {
        "prompt_tokens": read,
        "completion_tokens": usage.output_tokens,
        "total_tokens": read + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _chat_chunks(asked: Asked, said: Answered, serial: int, pieces: list[str]) -> list[bytes]:
    field = "refusal" if said.refused else "content"
    deltas: list[tuple[dict[str, Any], str | None]] = [({"role": "assistant"}, None)]
    if said.calls:
        calls = [{"index": i, **call} for i, call in enumerate(_chat_calls(said))]
        deltas.append(({"tool_calls": calls}, None))
    else:
        deltas += [({field: piece}, None) for piece in pieces]
    deltas.append(({}, _chat_reason(said)))
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        for delta, reason in deltas
    ]
    if asked.include_usage:
        chunks.append({"choices": [], "usage": _chat_usage(said.usage)})
    head = {
        "id": f"chatcmpl-{serial}",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": asked.model,
    }
    lines = [f"data: {json.dumps({**head, **chunk})}\n\n" for chunk in chunks]
    return [line.encode() for line in [*lines, "data: [DONE]\n\n"]]


def _response(asked: Asked, said: Answered, serial: int) -> Mapping[str, Any]:
    content = (
        {"type": "refusal", "refusal": said.text}
        if said.refused
        else {"type": "output_text", "text": said.text, "annotations": []}
    )
    status = "incomplete" if said.cut else "completed"
    read = said.usage.input_tokens + said.usage.cached_tokens
    return {
        "id": f"resp_{serial}",
        "object": "response",
        "created_at": 0,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if said.cut else None,
        "model": asked.model,
        "output": [
            {
                "type": "message",
                "id": f"msg_{serial}",
                "status": status,
                "role": "assistant",
                "content": [content],
            }
        ],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": said.usage.cached_tokens},
            "output_tokens": said.usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + said.usage.output_tokens,
        },
    }


def _message(asked: Asked, said: Answered, serial: int) -> dict[str, Any]:
    return {
        "id": f"msg_{serial}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": [{"type": "text", "text": said.text}],
        "stop_reason": _stop_reason(said),
        "stop_sequence": None,
        "usage": _message_usage(said.usage),
    }


def _stop_reason(said: Answered) -> str:
    return "refusal" if said.refused else "max_tokens" if said.cut else "end_turn"


def _message_usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }


def _message_events(asked: Asked, said: Answered, serial: int, pieces: list[str]) -> list[bytes]:
    start = _message(asked, said, serial)
    start |= {"content": [], "stop_reason": None, "usage": _message_usage(said.usage)}
    start["usage"]["output_tokens"] = 1
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": start},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    ]
    for piece in pieces:
        delta = {"type": "text_delta", "text": piece}
        events.append({"type": "content_block_delta", "index": 0, "delta": delta})
    events += [
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": _stop_reason(said), "stop_sequence": None},
            "usage": {"output_tokens": said.usage.output_tokens},
        },
        {"type": "message_stop"},
    ]
    return [f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in events]
