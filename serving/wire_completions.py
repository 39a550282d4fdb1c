"""`POST /v1/completions`: its request, its answer, and its chunks, which have the same shape."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from serving.wire_common import ForgeTold, SamplingFields, TokenId, Told, Usage

Ids = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(SamplingFields):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1)]
    ) = Field(description="text, texts, token ids, or lists of token ids")
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="most tokens of a response; default 16"
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="log-probabilities of every token, and of so many likeliest ones"
    )
    # Not served.
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None


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
    finish_reason: Literal["stop", "length"] | None


class TextCompletion(Told):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    forge: ForgeTold | None = None
    system_fingerprint: str | None = None
