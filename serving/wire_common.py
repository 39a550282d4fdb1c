"""What the requests and answers of all routes share, as pydantic models: the schema is the truth.

A field of OpenAI's that is not served may be given with the value that asks for nothing (`echo:
false`, `frequency_penalty: 0`), so that clients which always send it work; any other value, and any
field that is not here, is answered 400 with its name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

StopString = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Zero = Annotated[float, Field(ge=0, le=0)]
MAX_SEED = 2**63 - 1
MAX_COMPOSED = 8  # cartridges before one prompt
CartridgeText = Annotated[str, Field(max_length=128)]


class Wire(BaseModel):
    """A part of a request: no unknown fields, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Told(BaseModel):
    """A part of an answer: what was not set is left out."""

    def plain(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


class StreamOptions(Wire):
    include_usage: bool | None = Field(
        default=None, description="a last chunk with the usage of the whole request"
    )
    include_obfuscation: Literal[False] | None = Field(default=None, description="not served")


class ForgeOptions(Wire):
    """The extension field `forge`: which cartridges, and which strategy to answer with."""

    cartridge: str | None = Field(
        default=None, max_length=128, description="NAME, NAME@3 or NAME@latest"
    )
    cartridges: Annotated[list[CartridgeText], Field(max_length=MAX_COMPOSED)] | None = Field(
        default=None, description="several, composed in this order, in place of `cartridge`"
    )
    strategy: str | None = Field(
        default=None, max_length=64, description="a strategy's name, as `GET /v1/models` lists them"
    )
    options: dict[str, Any] | None = Field(default=None, description="the strategy's own options")
    form: str | None = Field(
        default=None,
        max_length=64,
        description="how answers are found in responses: general, math, rg, supergpqa",
    )
    budget: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="most tokens that the strategy may sample in all"
    )


class SamplingFields(Wire):
    """What both OpenAI endpoints take."""

    model: str = Field(max_length=320, description="BASE[+CARTRIDGE[@VERSION]][:STRATEGY]")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        default=None, description="0 is greedy; default 1"
    )
    top_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="nucleus mass; default 1"
    )
    top_k: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="extension: tokens kept; 0, the default, truncates nothing"
    )
    n: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="responses to one prompt; default 1"
    )
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] | None = Field(
        default=None, description="the same seed gives the same tokens, whatever else is decoded"
    )
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = Field(
        default=None, description="strings before which a response ends"
    )
    stream: bool | None = Field(default=None, description="server-sent events")
    stream_options: StreamOptions | None = None
    forge: ForgeOptions | None = None
    # Not about the answer: taken and left alone.
    user: str | None = None
    metadata: dict[str, str] | None = None
    # Not served.
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None


class Usage(Told):
    """Tokens, as they were read and sampled. A cartridge's tokens are no prompt tokens: they were
    not sent and not read; `forge.cartridge_tokens` has them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CartridgeTold(Told):
    name: str
    version: int
    tokens: int = Field(description="KV positions of the cartridge")


class StrategyTold(Told):
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


class ForgeTold(Told):
    """The extension field `forge` of an answer."""

    seed: int = Field(description="gives this answer again")
    cartridge: CartridgeTold | None = None
    cartridges: list[CartridgeTold] | None = Field(
        default=None, description="several, in the order in which they were composed"
    )
    cartridge_tokens: int = Field(description="KV positions before each prompt, 0 for none")
    strategy: StrategyTold | None = None


def usage(prompt_tokens: int, completion_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )
