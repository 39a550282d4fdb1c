"""Define the basic form of Anthropic's Messages API: requests with text and tools, and replies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from cartridge_forge.plugins.chat.wire.openai_chat import (
    MAX_SEED,
    ForgeExtension,
    ForgeOptions,
    StopString,
)
from cartridge_forge.plugins.chat.wire.openai_tools import MAX_TOOLS, CallId, ToolName
from cartridge_forge.plugins.chat.wire.parts import (
    MAX_ITEMS,
    RequestBody,
    RequestPart,
    ResponsePart,
)


class CacheableBlock(RequestPart):
    cache_control: dict[str, Any] | None = Field(None, description="taken and left alone")


class TextBlock(CacheableBlock):
    type: Literal["text"]
    text: str
    citations: None = None


TextBlocks = Annotated[list[TextBlock], Field(fail_fast=True, max_length=MAX_ITEMS)]


class ToolUseBlock(CacheableBlock):
    """Read a call that an earlier message made."""

    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: dict[str, Any]


class ToolResultBlock(CacheableBlock):
    """Read what a call gave."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: str | TextBlocks | None = None
    is_error: bool | None = None


# Tags begin with a capital, so that errors tell them from fields.
_KINDS = {"text": "Text", "tool_use": "Use", "tool_result": "Result"}


def _kind(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return _KINDS.get(kind) if isinstance(kind, str) else None


Block = Annotated[
    Annotated[TextBlock, Tag("Text")]
    | Annotated[ToolUseBlock, Tag("Use")]
    | Annotated[ToolResultBlock, Tag("Result")],
    Discriminator(
        _kind,
        custom_error_type="block_kind",
        custom_error_message="A block is text, a tool_use or a tool_result",
    ),
]


class SentMessage(RequestPart):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(fail_fast=True, max_length=MAX_ITEMS)]


class MessagesTool(CacheableBlock):
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="JSON schema of the input, an object")
    strict: bool | None = Field(None, description="follow the schema in every call")


class MessagesToolChoice(RequestPart):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = Field(None, description="of the type tool")
    disable_parallel_tool_use: bool | None = None


class MessagesFormat(RequestPart):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description="what the text satisfies")


class OutputConfig(RequestPart):
    format: MessagesFormat | None = None


class DisabledThinking(RequestPart):
    type: Literal["disabled"]


class CountTokensRequest(RequestBody):
    """Read what the prompt of a message is made of."""

    model: str = Field(
        max_length=320, description="auto or BASE[+CARTRIDGE[@VERSION]], [:STRATEGY]"
    )
    messages: list[SentMessage] = Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)
    system: str | TextBlocks | None = None
    tools: Annotated[list[MessagesTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None
    forge: ForgeOptions | None = Field(None, description="extension: cartridge and strategy")
    # Not served: neutral values only.
    thinking: DisabledThinking | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1, description="most tokens of the response")
    temperature: float | None = Field(None, ge=0, le=1, description="0 is greedy; default 1")
    top_p: float | None = Field(None, ge=0, le=1, description="nucleus mass; default 1")
    top_k: int | None = Field(None, ge=0, description="tokens kept; 0, the default: all")
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] | None = None
    stream: bool | None = Field(None, description="server-sent events")
    seed: int | None = Field(
        None, ge=-(2**63), le=MAX_SEED, description="extension: the same gives the same tokens"
    )
    # Accepted and ignored: no effect on the response.
    metadata: dict[str, Any] | None = Field(None, max_length=64)
    service_tier: Literal["auto", "standard_only"] | None = None


class MessagesUsage(ResponsePart):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: Literal[0]


class TokenCount(ResponsePart):
    input_tokens: int = Field(description="of the prompt; those of a cartridge are not sent")


class MessagesReply(ResponsePart):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]] = Field(description="blocks: text, and tool_use")
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage
    forge: ForgeExtension | None = None
