"""OpenAI's chat completions and completions, one copy for the server and the recorder of episodes.

`HarnessRequest` reads anybody's chat and leaves alone what it does not know. `ChatRequest` and
`CompletionRequest` are what the server takes; the schema is the truth. A field of OpenAI's that is
not served may be given with the value that asks for nothing (`echo: false`, `frequency_penalty:
0`), so that clients which always send it work; any other value, and any field that is not here,
is answered 400 with its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from protocols.teacher_replay import AgentTool, Role

MAX_SEED = 2**63 - 1
MAX_COMPOSED = 8  # cartridges before one prompt
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
CartridgeText = Annotated[str, Field(max_length=128)]
FinishReason = Literal["stop", "length"]


# A chat as anybody sends it


class HarnessText(BaseModel):
    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    name: str
    arguments: str = Field(description="JSON as text")


class HarnessCall(BaseModel):
    id: str
    function: CalledFunction


class HarnessMessage(BaseModel):
    """A message; its content is text, or parts of text, which are joined. An assistant's may be
    calls and no text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Sequence[HarnessText] | None = None
    tool_calls: list[HarnessCall] | None = None

    @property
    def text(self) -> str:
        content = self.content
        return content if isinstance(content, str) else "".join(p.text for p in content or ())

    @property
    def speaker(self) -> Role:
        """Return the role as templates have it: a developer is the system."""
        return "system" if self.role == "developer" else self.role


class OfferedFunction(BaseModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OfferedTool(BaseModel):
    function: OfferedFunction


class StreamOptions(BaseModel):
    include_usage: bool | None = Field(None, description="a last chunk with the request's usage")


class HarnessRequest(BaseModel):
    messages: list[HarnessMessage] = Field(min_length=1)
    tools: list[OfferedTool] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def offered(self) -> tuple[AgentTool, ...]:
        functions = [tool.function for tool in self.tools or ()]
        return tuple(AgentTool(f.name, f.description or "", f.parameters or {}) for f in functions)


# What the server takes


class RequestPart(BaseModel):
    """A part of a request: no unknown fields, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(HarnessText, RequestPart): ...


class ChatMessage(HarnessMessage, RequestPart):
    content: str | list[TextPart] | None = None
    name: str | None = Field(None, description="taken and left alone")
    # What clients send back of an answer of ours; none of it may hold anything.
    refusal: None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None
    tool_calls: list[Any] | None = Field(None, max_length=0)
    tool_call_id: str | None = None


class ServedStreamOptions(StreamOptions, RequestPart):
    include_obfuscation: Literal[False] | None = Field(None, description="not served")


class ForgeOptions(RequestPart):
    """The extension field `forge`: which cartridges, and which strategy to answer with."""

    cartridge: CartridgeText | None = Field(None, description="NAME, NAME@3 or NAME@latest")
    cartridges: list[CartridgeText] | None = Field(
        None, max_length=MAX_COMPOSED, description="composed in this order, in place of `cartridge`"
    )
    strategy: str | None = Field(None, max_length=64, description="its name in `GET /v1/models`")
    options: dict[str, Any] | None = Field(None, description="the strategy's own options")
    form: str | None = Field(
        None, max_length=64, description="how answers are found: general, math, rg, supergpqa"
    )
    budget: int | None = Field(None, ge=1, description="most tokens that the strategy may sample")


class SamplingFields(RequestPart):
    """What both OpenAI endpoints take."""

    model: str = Field(max_length=320, description="BASE[+CARTRIDGE[@VERSION]][:STRATEGY]")
    max_tokens: int | None = Field(
        None, ge=1, description="of a response; default: what the context leaves, 16 of completions"
    )
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default 1")
    top_p: float | None = Field(None, ge=0, le=1, description="nucleus mass; default 1")
    top_k: int | None = Field(None, ge=0, description="extension: tokens kept; 0, the default: all")
    n: int | None = Field(None, ge=1, le=1024, description="responses to a prompt; default 1")
    seed: int | None = Field(
        None, ge=-(2**63), le=MAX_SEED, description="the same gives the same tokens again"
    )
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = Field(
        None, description="strings before which a response ends"
    )
    stream: bool | None = Field(None, description="server-sent events")
    stream_options: ServedStreamOptions | None = None
    forge: ForgeOptions | None = None
    # Not about the answer: taken and left alone.
    user: str | None = None
    metadata: dict[str, str] | None = None
    # Not served.
    frequency_penalty: float | None = Field(None, ge=0, le=0)
    presence_penalty: float | None = Field(None, ge=0, le=0)
    logit_bias: dict[str, float] | None = Field(None, max_length=0)


class TextFormat(RequestPart):
    type: Literal["text"]


class ChatRequest(SamplingFields):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="max_tokens by its new name")
    logprobs: bool | None = Field(None, description="log-probabilities of every token")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="and of so many likeliest ones; needs logprobs"
    )
    # Not about the answer: taken and left alone.
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    # Not served.
    response_format: TextFormat | None = None
    tools: list[Any] | None = Field(None, max_length=0)
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = Field(None, max_length=1)


class CompletionRequest(SamplingFields):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1)]
    ) = Field(description="text, texts, token ids, or lists of token ids")
    logprobs: int | None = Field(
        None, ge=0, le=20, description="log-probabilities of every token and of so many likeliest"
    )
    # Not served.
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None


# What the server answers


class ResponsePart(BaseModel):
    """A part of an answer: what was not set is left out."""

    def plain(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


class TokenUsage(ResponsePart):
    """Tokens, as they were read and sampled. A cartridge's tokens are no prompt tokens: they were
    not sent and not read; `forge.cartridge_tokens` has them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def usage(prompt_tokens: int, completion_tokens: int) -> TokenUsage:
    return TokenUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )


class CartridgeInfo(ResponsePart):
    name: str
    version: int
    tokens: int = Field(description="KV positions of the cartridge")


class StrategyInfo(ResponsePart):
    """How a strategy came to its answer."""

    name: str
    options: dict[str, Any]
    answer: str | None = Field(description="the answer found in the chosen response")
    tokens: int = Field(description="tokens sampled in all")
    prompt_tokens: int = Field(description="prompt tokens read in all")
    calls: int = Field(description="batched calls of the generators")
    asks: int = Field(description="responses sampled in all")
    seconds: float
    details: dict[str, Any] = Field(description="votes, steps with scores, populations")


class ForgeExtension(ResponsePart):
    """The extension field `forge` of an answer."""

    seed: int = Field(description="gives this answer again")
    cartridge: CartridgeInfo | None = None
    cartridges: list[CartridgeInfo] | None = Field(None, description="several, as composed")
    cartridge_tokens: int = Field(description="KV positions before each prompt, 0 for none")
    strategy: StrategyInfo | None = None


class CompletionHead(ResponsePart):
    """What both endpoints' answers and chunks have. In a stream `usage` is there with
    include_usage, null but in the last chunk, and `forge` with the reason to end."""

    id: str
    created: int
    model: str
    usage: TokenUsage | None = None
    forge: ForgeExtension | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """Natural logs under the distribution at temperature 1, before truncation."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(ResponsePart):
    """The message of a choice, or the delta of a chunk's."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    refusal: None = None


class ChatChoice(ResponsePart):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(CompletionHead):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    system_fingerprint: str | None = None


class ChunkChoice(ResponsePart):
    index: int
    delta: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(CompletionHead):
    """One event of a stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]


class CompletionLogprobs(BaseModel):
    """Natural logs under the distribution at temperature 1, before truncation. Offsets are
    characters from the start of the response."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class TextCompletion(CompletionHead):
    """A whole answer, or one event of a stream: they have the same shape."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
