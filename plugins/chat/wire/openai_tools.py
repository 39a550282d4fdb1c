"""Define the tools of a chat: what a request offers, which call it asks for, and calls as sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from cartridge_forge.plugins.chat.messages import AgentTool
from cartridge_forge.plugins.chat.wire.parts import RequestPart, ResponsePart

MAX_TOOLS = 64  # of one request, and calls of one message
ToolName = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class CalledFunction(BaseModel):
    name: str
    arguments: str = Field(description="JSON as text")


class HarnessCall(BaseModel):
    """Read a call of an assistant's message, of any client."""

    id: str
    function: CalledFunction


class OfferedFunction(BaseModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OfferedTool(BaseModel):
    function: OfferedFunction


def agent_tools(tools: Sequence[OfferedTool]) -> tuple[AgentTool, ...]:
    """Return the tools as chat templates read them."""
    functions = [tool.function for tool in tools]
    return tuple(AgentTool(f.name, f.description or "", f.parameters or {}) for f in functions)


class ServedFunction(OfferedFunction, RequestPart):
    name: ToolName
    parameters: dict[str, Any] | None = Field(
        None, description="JSON schema of the arguments, an object; default: no arguments"
    )
    strict: bool | None = Field(
        None, description="follow the schema in every call; a call that is asked for follows it"
    )


class ServedTool(OfferedTool, RequestPart):
    type: Literal["function"]
    function: ServedFunction


class NamedFunction(RequestPart):
    name: ToolName


class NamedTool(RequestPart):
    """Ask for a call of one tool."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool
ServedTools = Annotated[list[ServedTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class SentFunction(CalledFunction, RequestPart):
    name: ToolName


class SentCall(HarnessCall, RequestPart):
    """Read a call that an earlier response made, as its client sends it back."""

    id: CallId
    type: Literal["function"] = "function"
    function: SentFunction


SentCalls = Annotated[list[SentCall], Field(fail_fast=True, max_length=MAX_TOOLS)]


class AnsweredFunction(ResponsePart):
    """Hold a call's name and arguments; of a chunk: what is new of them."""

    name: str = ""
    arguments: str


class AnsweredCall(ResponsePart):
    """Hold a call of a response. In a stream a call's first chunk has its id, type and name, and
    each of them its `index`."""

    index: int = 0
    id: str = ""
    type: Literal["function"] = "function"
    function: AnsweredFunction
