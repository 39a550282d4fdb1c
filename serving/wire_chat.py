"""`POST /v1/chat/completions`: its request, its answer, its chunks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from serving.wire_common import ForgeTold, SamplingFields, Told, Usage, Wire

Nothing = Annotated[list[Any], Field(max_length=0)]
FinishReason = Literal["stop", "length"]


class TextPart(Wire):
    type: Literal["text"]
    text: str


class ChatMessage(Wire):
    """A message; its content is text, or parts of text, which are joined."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = Field(default=None, description="taken and left alone")
    # What clients send back of an answer of ours; none of it may hold anything.
    refusal: None = None
    annotations: Nothing | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Nothing | None = None
    tool_call_id: str | None = None


class TextFormat(Wire):
    type: Literal["text"]


class ChatRequest(SamplingFields):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="most tokens of a response; max_completion_tokens by its old name"
    )
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="most tokens of a response; default: what the context leaves"
    )
    logprobs: bool | None = Field(default=None, description="log-probabilities of every token")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="and of so many likeliest ones; needs logprobs"
    )
    # Not about the answer: taken and left alone.
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    # Not served.
    response_format: TextFormat | None = None
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(BaseModel):
    """Natural logs under the distribution at temperature 1, before truncation."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Told):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    forge: ForgeTold
    system_fingerprint: str | None = None


class Delta(Told):
    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChunkChoice(Told):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(Told):
    """One event of a stream. `usage` is there with include_usage: null but in the last chunk."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    forge: ForgeTold | None = None
