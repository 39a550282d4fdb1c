"""Describe a parsed request as plain data: names resolved, texts tokenised."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.library.formats.cartridge_file import date_of
from cartridge_forge.plugins.library.store import CartridgeVersion
from cartridge_forge.plugins.serve.routing import RoutedChoice
from cartridge_forge.plugins.serve.structured.tools import ToolOffer
from cartridge_forge.plugins.serve.tokenization import TokenizedPrompt
from cartridge_forge.protocols.response_rules import LogitRules, ResponseGrammar
from cartridge_forge.protocols.step import (
    Draft,
    GenerateRequest,
    PrefixRef,
    Sampling,
    StopCondition,
)

VerifyMode = Literal["after", "exact", "auto"]


@dataclass(frozen=True)
class StrategyRequest:
    """Name a strategy and its options: `StrategyRequest("self_consistency", {"samples": 8}, "math",
    512)`."""

    name: str
    options: Mapping[str, Any]
    form: str
    budget: int | None


@dataclass(frozen=True)
class ServingRequest:
    """Ask for `n` responses to each prompt. With `top_logprobs` None no log-probabilities are
    returned. `entries` are the cartridges in the order of their composition, empty for the bare
    model; `routed` tells how the router chose the only one. With a strategy, which reads
    `messages`, there is one prompt and one response. `tools` are those that responses may call.
    Where prompts are echoed `sampling.max_tokens` may be 0: then nothing is sampled. `verify` tells
    how the document of the only cartridge verifies the responses, None: not at all. `supported` is
    the question whose responses are told with passages of that document, None: without. The first
    of `stop_ids` ends a response, whose text does not have it."""

    id: str
    model: str
    prompts: tuple[TokenizedPrompt, ...]
    n: int
    sampling: Sampling
    seed: int
    stops: tuple[str, ...] = ()
    top_logprobs: int | None = None
    stream: bool = False
    entries: tuple[CartridgeVersion, ...] = ()
    routed: RoutedChoice | None = None
    messages: tuple[AgentMessage, ...] = ()
    strategy: StrategyRequest | None = None
    grammar: ResponseGrammar | None = None
    tools: ToolOffer | None = None
    verify: VerifyMode | None = None
    supported: str | None = None
    rules: LogitRules | None = None
    stop_ids: tuple[int, ...] = ()

    @property
    def echo(self) -> bool:
        return any(p.echoed for p in self.prompts)

    @property
    def responses(self) -> int:
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        """Return the number of prompt tokens; each prompt counts once."""
        return sum(p.counted for p in self.prompts)

    @property
    def cartridge_tokens(self) -> int:
        return sum(entry.manifest.tokens for entry in self.entries)


def requests_of(
    request: ServingRequest,
    prefix: PrefixRef,
    document_ids: tuple[int, ...] = (),
    draft: Draft | None = None,
) -> list[GenerateRequest]:
    """Return one request for each response, ordered by prompt."""
    offer = request.tools
    after_one = (offer.form.end,) if offer and offer.most and offer.form.end else ()
    strings = (*request.stops, *after_one)
    until = StopCondition(strings=strings) if strings else None
    # An engine samples a token at least; the reply to a request for none leaves it out.
    sampling = replace(request.sampling, max_tokens=max(1, request.sampling.max_tokens))
    return [
        GenerateRequest(
            id=f"{request.id}/{p * request.n + i}",
            prompt_ids=prompt.ids,
            prefix=prefix,
            sampling=sampling,
            seed=seed_of(request.seed, p * request.n + i),
            prompt_logprobs=request.echo and request.top_logprobs is not None,
            top_logprobs=request.top_logprobs or 0,
            until=until,
            grammar=request.grammar,
            logprobs=request.top_logprobs is not None,
            document_ids=document_ids,
            draft=draft,
            rules=request.rules,
            stop_ids=request.stop_ids,
        )
        for p, prompt in enumerate(request.prompts)
        for i in range(request.n)
    ]


def chat_date(entries: Sequence[CartridgeVersion]) -> datetime | None:
    """Return the date that prompts over these cartridges tell: that of the first, which begins the
    conversation; None where it keeps none."""
    return date_of(entries[0].manifest.source) if entries else None


def drawn_seed(request_id: str) -> int:
    """Return the seed for a request without one; the reply states it, for repetition."""
    return _hashed(f"serving/{request_id}")


def seed_of(seed: int, response: int) -> int:
    """Return the request's own seed for the first response, a hash of it for the others."""
    return seed % 2**63 if response == 0 else _hashed(f"serving/{seed}/{response}")


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
