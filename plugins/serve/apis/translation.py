"""Build a chat from another API's request, and name that request's fields in errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from cartridge_forge.plugins.chat.wire.errors import ApiError, bad_request
from cartridge_forge.plugins.chat.wire.openai_chat import ChatRequest


class ChatFields:
    """Collect a chat's fields and messages, with the place of each in the request that it is of.

    `places` maps places of the chat to those of the request: {"messages[1]": "input[0]"}.
    """

    def __init__(self, **fields: Any) -> None:
        self.fields = {name: value for name, value in fields.items() if value is not None}
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}

    def add(self, role: str, content: str | None, path: str, **more: Any) -> None:
        self.places[f"messages[{len(self.messages)}]"] = path
        if "[" not in path:  # a field of text
            self.places[f"messages[{len(self.messages)}].content"] = path
        if "tool_call_id" in more:
            named = "tool_use_id" if "content[" in path else "call_id"
            self.places[f"messages[{len(self.messages)}].tool_call_id"] = f"{path}.{named}"
        self.messages.append({"role": role, "content": content, **more})

    def call(self, call_id: str, name: str, arguments: str, path: str) -> None:
        """Add a call to the assistant's message at the end, or to a new one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add("assistant", None, path)
        calls = self.messages[-1].setdefault("tool_calls", [])
        at = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self.places[f"{at}.function"] = path
        calls.append({"id": call_id, "function": {"name": name, "arguments": arguments}})

    def chat(self, stream: bool | None) -> ChatRequest:
        """Return the chat. Raises ApiError 400 where it is none, with the request's field."""
        plain = {**self.fields, "messages": self.messages, "stream": bool(stream)}
        try:
            return ChatRequest.model_validate(plain)
        except ValidationError as error:
            fault = error.errors()[0]
            parts = [f"[{p}]" if isinstance(p, int) else f".{p}" for p in fault["loc"]]
            param = "".join(parts).removeprefix(".")
            raise bad_request(f"{param}: {fault['msg']}", param) from error


@contextmanager
def renaming(places: Mapping[str, str]) -> Iterator[None]:
    """Raise errors of the block with the request's own names of fields, longest first."""
    try:
        yield
    except ApiError as error:
        longest = sorted(places, key=len, reverse=True)
        pattern = re.compile("|".join(rf"(?<![\w.]){re.escape(name)}(?!\w)" for name in longest))

        def renamed(text: str) -> str:
            return pattern.sub(lambda match: places[match[0]], text)

        raise ApiError(
            error.status_code, renamed(str(error.detail)),
            param=error.param and renamed(error.param), code=error.code,
            retry_after=error.retry_after,
        ) from error  # fmt: skip
