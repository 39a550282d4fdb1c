"""Define the batched interface between strategies and backends.

The mesh's generators (exact tokens, any cartridge), vLLM and external APIs implement `Sampler`.
APIs return less; `abilities` lists what a backend supports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import Sampling, StopCondition

Ability = Literal["logprobs", "top_logprobs", "continue", "until", "confidence", "seed"]
ABILITIES: frozenset[Ability] = frozenset(
    {"logprobs", "top_logprobs", "continue", "until", "confidence", "seed"}
)


@dataclass(frozen=True)
class PartialResponse:
    """Hold the start of a response to continue: its text and, where known, its token ids."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SampleRequest:
    """Request one response, new or continued from `begun`.

    `SampleRequest("q1/0", (AgentMessage("user", "what is 2 + 2?"),), Sampling(max_tokens=64),
    seed=7)`. Equal seeds give equal tokens if the sampler has the ability "seed". `until` ends the
    response early; `top_logprobs` is the number of likeliest tokens to return at every position.
    """

    id: str
    messages: tuple[AgentMessage, ...]
    sampling: Sampling
    seed: int
    begun: PartialResponse = PartialResponse()
    until: StopCondition | None = None
    top_logprobs: int = 0


@dataclass(frozen=True)
class SampleResult:
    """Hold the response to one `SampleRequest`, without the part that it continued.

    `tokens` and `prompt_tokens` are the backend's counts. `token_ids`, `logprobs` and
    `top_logprobs` (for each token the likeliest, as (text, log-probability), likeliest first) are
    empty where the backend returns none. `finish_reason` and `ended_by` are those of
    `protocols.step.Completion`; only `TokenBudget` sets "budget", for a response that it cuts
    short. `text` decodes all `token_ids`, without special tokens; `top_token_ids` are the ids of
    `top_logprobs`.
    """

    text: str
    tokens: int
    prompt_tokens: int
    finish_reason: str
    ended_by: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[str, float], ...], ...] = ()
    top_token_ids: tuple[tuple[int, ...], ...] = ()


class Sampler(Protocol):
    """Sample all requests of a call together, and return the results in their order.

    Raises DataError for a request that it cannot serve, RunError if no reply arrives in time.
    """

    @property
    def abilities(self) -> frozenset[Ability]: ...

    async def __call__(self, requests: Sequence[SampleRequest]) -> list[SampleResult]: ...


def require(sampler: Sampler, strategy: str, *needed: Ability) -> None:
    """Raise DataError, before any sampling, if the sampler lacks a needed ability."""
    lacking = sorted(set(needed) - sampler.abilities)
    if lacking:
        raise DataError(
            f"{strategy} needs a backend that tells or takes {', '.join(lacking)}, and this one "
            "does not; use the mesh's generators or vLLM, or a strategy that looks at texts alone "
            "(chain_of_thought, self_consistency, rsa)"
        )


class AlternatingSampler:
    """Serve request i of a call by sampler i modulo their number."""

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self._samplers = tuple(samplers)
        self.abilities: frozenset[Ability] = frozenset.intersection(
            *(sampler.abilities for sampler in self._samplers)
        )

    async def __call__(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Return the results in the requests' order. Raises what the samplers raise."""
        turns = len(self._samplers)
        shares = [list(requests[turn::turns]) for turn in range(turns)]
        answered = await asyncio.gather(
            *(sampler(share) for sampler, share in zip(self._samplers, shares, strict=True))
        )
        return [answered[i % turns][i // turns] for i in range(len(requests))]
