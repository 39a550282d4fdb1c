"""Define the basic form of OpenAI's Responses API: requests with text and functions, and replies.

Nothing is kept between requests, so the whole conversation is sent as `input`. A field that is not
served may be given with its neutral value, as in `openai_chat`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from cartridge_forge.plugins.chat.wire.openai_chat import (
    MAX_SEED,
    ForgeExtension,
    ForgeOptions,
    ServedStreamOptions,
)
from cartridge_forge.plugins.chat.wire.openai_tools import (
    MAX_TOOLS,
    CallId,
    ServedFunction,
    ToolName,
)
from cartridge_forge.plugins.chat.wire.parts import (
    MAX_ITEMS,
    RequestBody,
    RequestPart,
    ResponsePart,
)

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(RequestPart):
    """Read a part of a message: text of the user, or of an earlier response."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = Field(None, max_length=0)


InputParts = Annotated[list[InputText], Field(fail_fast=True, max_length=MAX_ITEMS)]


class InputItem(RequestPart):
    """Serve as the base of the items of a conversation; earlier responses' have id and status."""

    id: str | None = None
    status: Status | None = None


class InputMessage(InputItem):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | InputParts


class InputCall(InputItem):
    """Read a call that an earlier response made."""

    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: str


class InputResult(InputItem):
    """Read what a call gave."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: str | InputParts


# Tags begin with a capital, so that errors tell them from fields.
_KINDS = {"message": "Message", "function_call": "Call", "function_call_output": "Result"}


def _kind(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return _KINDS.get(kind) if isinstance(kind, str) else None


Item = Annotated[
    Annotated[InputMessage, Tag("Message")]
    | Annotated[InputCall, Tag("Call")]
    | Annotated[InputResult, Tag("Result")],
    Discriminator(
        _kind,
        custom_error_type="item_kind",
        custom_error_message="An item is a message, a function_call or a function_call_output",
    ),
]


class ResponsesTool(ServedFunction):
    type: Literal["function"]


class ResponsesNamedTool(RequestPart):
    type: Literal["function"]
    name: ToolName


class ResponsesFormat(RequestPart):
    """Read what the text is: text, a JSON object, or JSON that satisfies a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: ToolName | None = Field(None, description="taken and left alone")
    description: str | None = Field(None, description="taken and left alone")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="of json_schema")
    strict: bool | None = Field(None, description="a schema is always kept to")


class ResponsesText(RequestPart):
    format: ResponsesFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(RequestBody):
    model: str = Field(
        max_length=320, description="auto or BASE[+CARTRIDGE[@VERSION]], [:STRATEGY]"
    )
    input: str | Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = Field(None, description="a system message before the input")
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = (
        Field(None, description="functions that may be called")
    )
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="default true")
    text: ResponsesText | None = None
    max_output_tokens: int | None = Field(
        None, ge=1, description="default: what the context leaves"
    )
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default 1")
    top_p: float | None = Field(None, ge=0, le=1, description="nucleus mass; default 1")
    seed: int | None = Field(
        None, ge=-(2**63), le=MAX_SEED, description="extension: the same gives the same tokens"
    )
    stream: bool | None = Field(None, description="server-sent events")
    stream_options: ServedStreamOptions | None = None
    forge: ForgeOptions | None = Field(None, description="extension: cartridge and strategy")
    # Accepted and ignored: no effect on the response.
    metadata: dict[str, Any] | None = Field(None, max_length=64)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    # Not served: neutral values only.
    previous_response_id: None = None
    conversation: None = None
    reasoning: None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Any] | None = Field(None, max_length=0)
    max_tool_calls: None = None
    top_logprobs: Literal[0] | None = None


class InputTokenDetails(ResponsePart):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokenDetails(ResponsePart):
    reasoning_tokens: int


class ResponsesUsage(ResponsePart):
    input_tokens: int
    input_tokens_details: InputTokenDetails
    output_tokens: int
    output_tokens_details: OutputTokenDetails
    total_tokens: int


class ResponsesReply(ResponsePart):
    """Hold a response; in events of a stream that come earlier, without usage."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    incomplete_details: dict[str, str] | None
    error: None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]] = Field(description="a message with its text, and function_calls")
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponsesUsage | None
    forge: ForgeExtension | None = None
