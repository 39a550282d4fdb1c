"""Define OpenAI's chat completions and completions, for the server and for the episode recorder.

`HarnessRequest` reads any client's chat and ignores unknown fields. `ChatRequest` and
`CompletionRequest` are the server's strict schema. A field of OpenAI or of vLLM that is not served
may be given with its neutral value (`best_of: 1`, `min_tokens: 0`), so that clients which always
send it work. The server answers any other value, and any field that is not here, with 400 and its
name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from cartridge_forge.plugins.chat.messages import AgentTool, Role
from cartridge_forge.plugins.chat.wire.openai_tools import (
    AnsweredCall,
    HarnessCall,
    OfferedTool,
    SentCalls,
    ServedTools,
    ToolChoice,
    agent_tools,
)
from cartridge_forge.plugins.chat.wire.parts import (
    MAX_IDS,
    MAX_ITEMS,
    RequestBody,
    RequestPart,
    ResponsePart,
)
from cartridge_forge.protocols.response_rules import LEAST_REPETITION, MOST_REPETITION

MAX_SEED = 2**63 - 1
MAX_COMPOSED = 8  # cartridges before one prompt
MAX_STOP_IDS = 256
Bias = Annotated[float, Field(allow_inf_nan=False)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_IDS)]
CartridgeText = Annotated[str, Field(max_length=128)]
FinishReason = Literal["stop", "length", "tool_calls"]


# Chats of any client


class HarnessText(BaseModel):
    type: Literal["text"]
    text: str


class HarnessMessage(BaseModel):
    """Read a message; its content is text, or parts of text, which are joined. An assistant's
    message may hold calls and no text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Sequence[HarnessText] | None = None
    tool_calls: Sequence[HarnessCall] | None = None

    @property
    def text(self) -> str:
        content = self.content
        return content if isinstance(content, str) else "".join(p.text for p in content or ())

    @property
    def speaker(self) -> Role:
        """Return the role for chat templates: "developer" becomes "system"."""
        return "system" if self.role == "developer" else self.role


class StreamOptions(BaseModel):
    include_usage: bool | None = Field(None, description="a last chunk with the request's usage")


class HarnessRequest(BaseModel):
    messages: list[HarnessMessage] = Field(min_length=1)
    tools: list[OfferedTool] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def offered(self) -> tuple[AgentTool, ...]:
        return agent_tools(self.tools or ())


# Requests to the server


class TextPart(HarnessText, RequestPart): ...


class ChatMessage(HarnessMessage, RequestPart):
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_ITEMS)] | None = (
        None
    )
    name: str | None = Field(None, description="taken and left alone")
    # Clients send these fields back from earlier responses; they must be empty.
    refusal: None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None
    tool_calls: SentCalls | None = Field(None, description="an assistant's calls of tools")
    tool_call_id: str | None = Field(None, max_length=256, description="of a tool's message")


class ServedStreamOptions(StreamOptions, RequestPart):
    include_obfuscation: Literal[False] | None = Field(None, description="not served")


Verify = Literal[True, False, "after", "auto"]


class ForgeOptions(RequestPart):
    """Read the extension field `forge`: which cartridges, which strategy to answer with, and
    whether the document verifies the answer."""

    cartridge: CartridgeText | None = Field(None, description="NAME, NAME@3, NAME@latest, or auto")
    cartridges: list[CartridgeText] | None = Field(
        None, max_length=MAX_COMPOSED, description="composed in this order, in place of `cartridge`"
    )
    strategy: str | None = Field(None, max_length=64, description="its name in `GET /v1/models`")
    options: dict[str, Any] | None = Field(None, description="the strategy's own options")
    form: str | None = Field(
        None, max_length=64, description="how answers are found: general, math, rg, supergpqa"
    )
    budget: int | None = Field(None, ge=1, description="most tokens that the strategy may sample")
    verify: Verify | None = Field(
        None,
        description="true: the document's own answer, of tokens that the cartridge proposes; auto: "
        "the same, proposed only where that pays; after: the cartridge's answer, scored by its "
        "document; default: verify.mode of the server",
    )
    passages: bool | None = Field(
        None, description="tell the passages of the cartridge's document that support each response"
    )


class StructuredOutputs(RequestPart):
    """Read the extension field `structured_outputs`, in vLLM's form: one of its fields."""

    json_: dict[str, Any] | None = Field(None, alias="json", description="a JSON schema")
    regex: str | None = Field(None, min_length=1, description="in Rust's syntax, from end to end")
    choice: list[str] | None = Field(
        None, min_length=1, max_length=MAX_ITEMS, description="the texts that may be answered"
    )


class SamplingFields(RequestBody):
    """Read the fields that both OpenAI endpoints share."""

    model: str = Field(
        max_length=320, description="auto or BASE[+CARTRIDGE[@VERSION]], [:STRATEGY]"
    )
    max_tokens: int | None = Field(
        None, ge=1, description="of a response; default: what the context leaves"
    )
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default 1")
    top_p: float | None = Field(None, ge=0, le=1, description="nucleus mass; default 1")
    top_k: int | None = Field(
        None, ge=-1, description="extension: tokens kept; 0, the default, and -1: all"
    )
    min_p: float | None = Field(
        None, ge=0, le=1, description="extension: least share of the likeliest token's probability"
    )
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="taken off a logit each time that its token was sampled"
    )
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="taken off a logit whose token was sampled"
    )
    repetition_penalty: float | None = Field(
        None, ge=LEAST_REPETITION, le=MOST_REPETITION,
        description="extension: divisor of logits above 0, factor of others, of tokens in the "
        "prompt or the response",
    )  # fmt: skip
    logit_bias: dict[str, Bias] | None = Field(
        None, max_length=MAX_ITEMS, description="added to the logits of token ids, -100 to 100"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = Field(
        None, description="extension: tokens before which a response ends"
    )
    n: int | None = Field(None, ge=1, le=1024, description="responses to a prompt; default 1")
    seed: int | None = Field(
        None, ge=-(2**63), le=MAX_SEED, description="the same gives the same tokens again"
    )
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = Field(
        None, description="strings before which a response ends"
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="extension: what the text of a response must match"
    )
    stream: bool | None = Field(None, description="server-sent events")
    stream_options: ServedStreamOptions | None = None
    forge: ForgeOptions | None = None
    # Accepted and ignored: no effect on the response.
    user: str | None = None
    metadata: dict[str, Any] | None = Field(None, max_length=64)
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    request_id: str | None = None
    priority: int | None = None
    # Not served: neutral values only.
    add_special_tokens: bool | None = None
    allowed_token_ids: None = None
    bad_words: list[Any] | None = Field(None, max_length=0)
    ignore_eos: Literal[False] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    length_penalty: float | None = Field(None, ge=1, le=1)
    min_tokens: int | None = Field(None, ge=0, le=0)
    prompt_logprobs: None = None
    return_token_ids: Literal[False] | None = None
    return_tokens_as_token_ids: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    truncate_prompt_tokens: None = None
    use_beam_search: Literal[False] | None = None


class JsonSchemaFormat(RequestPart):
    name: str = Field(pattern="^[A-Za-z0-9_-]{1,64}$", description="taken and left alone")
    description: str | None = Field(None, description="taken and left alone")
    schema_: dict[str, Any] = Field(alias="schema", description="what a response satisfies")
    strict: bool | None = Field(None, description="a schema is always kept to")


class ResponseFormat(RequestPart):
    """Read what a response is: text, a JSON object, or JSON that satisfies a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class ChatRequest(SamplingFields):
    messages: list[ChatMessage] = Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)
    max_completion_tokens: int | None = Field(None, ge=1, description="max_tokens by its new name")
    logprobs: bool | None = Field(None, description="log-probabilities of every token")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="and of so many likeliest ones; needs logprobs"
    )
    # Accepted and ignored: no effect on the response.
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    include_reasoning: bool | None = None
    verbosity: str | None = Field(None, max_length=64)
    # Given to the chat template, where it reads them.
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=64, description="extension: variables of the chat template"
    )
    reasoning_effort: str | None = Field(
        None, max_length=64, description="a variable of the chat template"
    )
    response_format: ResponseFormat | None = None
    tools: ServedTools | None = Field(None, description="functions that may be called")
    tool_choice: ToolChoice | None = Field(
        None, description="auto, the default: the model decides; required, or a tool: it must call"
    )
    parallel_tool_calls: bool | None = Field(
        None, description="whether a response may hold several calls; default true"
    )
    # Not served: neutral values only.
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    chat_template: None = None
    echo: Literal[False] | None = None
    documents: None = None
    modalities: list[Literal["text"]] | None = Field(None, max_length=1)
    thinking_token_budget: None = None


class CompletionRequest(SamplingFields):
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)]
        | Ids
        | Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)]
    ) = Field(description="text, texts, token ids, or lists of token ids")
    max_tokens: int | None = Field(
        None, ge=0, description="of a response, default 16; 0 with echo: none is sampled"
    )
    logprobs: int | None = Field(
        None, ge=0, le=20, description="log-probabilities of every token and of so many likeliest"
    )
    echo: bool | None = Field(None, description="the prompt before each response, with logprobs")
    # Not served: neutral values only.
    best_of: Literal[1] | None = None
    suffix: None = None


# Responses of the server


class TokenUsage(ResponsePart):
    """Count tokens that were read and sampled. A cartridge's tokens are not prompt tokens, as they
    are neither sent nor read; `forge.cartridge_tokens` counts them."""

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


class RoutedInfo(ResponsePart):
    """Describe why the router chose the cartridge: by its BM25 score for the question's words."""

    score: float
    runner_up: str | None = Field(description="the next best cartridge, null for none")
    runner_up_score: float | None


class StrategyInfo(ResponsePart):
    """Describe how a strategy found its answer."""

    name: str
    options: dict[str, Any]
    answer: str | None = Field(description="the answer found in the chosen response")
    tokens: int = Field(description="tokens sampled in all")
    prompt_tokens: int = Field(description="prompt tokens read in all")
    calls: int = Field(description="batched calls of the generators")
    asks: int = Field(description="responses sampled in all")
    seconds: float
    details: dict[str, Any] = Field(description="votes, steps with scores, populations")


class ChangedToken(ResponsePart):
    """Describe a token of an answer where the document's likeliest token is another one, or to
    which the document gives less than the threshold."""

    index: int = Field(description="of the answer's tokens, from 0")
    offset: int = Field(description="character of the answer at which it begins")
    token: str
    probability: float = Field(description="that the document gives it, at temperature 1")
    document_token: str = Field(description="the document's likeliest token in its place")
    document_probability: float
    refused: bool = Field(description="whether its probability is below the threshold")


class CheckedChoice(ResponsePart):
    """Hold the document's word on one choice. The shares are null for an answer of no token."""

    index: int = Field(description="of the choice")
    tokens: int = Field(description="tokens scored, an end token among them")
    accepted: float | None = Field(description="share to which the document gives the threshold")
    agreed: float | None = Field(description="share that is the document's likeliest token")
    first_refused: int | None = Field(description="index of the first token below the threshold")
    changed: list[ChangedToken]


class DraftInfo(ResponsePart):
    """Count the draft of all choices: tokens proposed, those of them that stayed, and the passes
    over the document that verified them."""

    block: int = Field(description="tokens proposed at a time")
    proposed: int
    accepted: int
    verifications: int


class VerifyInfo(ResponsePart):
    """Describe how the document verified an answer: `after` scored it, `exact` accepted or replaced
    each token of a draft, and `document` wrote it alone, as `auto` chose. An answer of the last two
    is the document's own."""

    mode: Literal["after", "exact", "document"]
    document_tokens: int = Field(description="of the document, with the template around it")
    below: float | None = Field(default=None, description="the threshold of after")
    choices: list[CheckedChoice] | None = Field(default=None, description="of after")
    draft: DraftInfo | None = Field(default=None, description="of exact")


class SupportingText(ResponsePart):
    """Hold a passage of the document: its characters there, from `start` to before `stop`."""

    start: int
    stop: int
    text: str
    score: float = Field(description="by BM25, for the question and the response together")


class ChoicePassages(ResponsePart):
    """Hold the passages that support one choice, best first; none where no passage shares a word
    with it."""

    index: int = Field(description="of the choice")
    passages: list[SupportingText]


class ForgeExtension(ResponsePart):
    """Carry the extension field `forge` of a response."""

    seed: int = Field(description="gives this answer again")
    cartridge: CartridgeInfo | None = None
    cartridges: list[CartridgeInfo] | None = Field(None, description="several, as composed")
    routed: RoutedInfo | None = Field(None, description="why `cartridge`, where `auto` was asked")
    cartridge_tokens: int = Field(description="KV positions before each prompt, 0 for none")
    strategy: StrategyInfo | None = None
    verify: VerifyInfo | None = Field(
        default=None, description="where a document verified the answer"
    )
    passages: list[ChoicePassages] | None = Field(
        default=None, description="where `forge.passages` asked for them"
    )


class CompletionHead(ResponsePart):
    """Carry the fields that responses and chunks of both endpoints share. In a stream with
    include_usage `usage` is null but in the last chunk; `forge` comes with the finish reason."""

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
    """Hold natural logs under the distribution at temperature 1, before truncation."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(ResponsePart):
    """Hold the message of a choice, or the delta of a chunk's choice."""

    role: Literal["assistant"] = "assistant"
    content: str | None = Field(default="", description="null for a message of calls alone")
    refusal: None = None
    tool_calls: list[AnsweredCall] | None = None


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
    """Hold one event of a stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]


class CompletionLogprobs(BaseModel):
    """Hold natural logs under the distribution at temperature 1, before truncation. Offsets count
    characters from the start of the text. An echoed prompt's first token has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class TextCompletion(CompletionHead):
    """Hold a whole response, or one event of a stream: both have one shape."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
