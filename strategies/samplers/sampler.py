"""What a strategy asks and is told: one batched port over every backend.

`Sampler` is satisfied by the mesh's generators (exact tokens, any cartridge), by vLLM, and by
external APIs, which tell less: `abilities` says what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from protocols.errors import DataError
from protocols.teacher_replay import AgentMessage
from protocols.types import Sampling, StopCondition

Ability = Literal["logprobs", "top_logprobs", "continue", "until", "confidence", "seed"]
ABILITIES: frozenset[Ability] = frozenset(
    {"logprobs", "top_logprobs", "continue", "until", "confidence", "seed"}
)


@dataclass(frozen=True)
class PartialResponse:
    """What of a response is said already, to be gone on with: text and, where known, its ids."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SampleRequest:
    """One response to sample, or to go on with.

    `SampleRequest("q1/0", (Message("user", "what is 2 + 2?"),), Sampling(max_tokens=64), seed=7)`.
    The same `seed` gives the same tokens where the sampler has the ability "seed". `until` ends it
    early, `top_logprobs` asks for so many of the likeliest tokens at every place.
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
    """What was said to one `SampleRequest`, without what had begun it.

    `tokens` and `prompt_tokens` are what the backend counts. `token_ids`, `logprobs` and
    `top_logprobs` (per token the likeliest, as (text, log-probability), likeliest first) are empty
    where it does not tell. `finish_reason` and `ended_by` as in `protocols.types.Completion`; the
    `Meter` alone says "budget", for a response that is cut short by it.
    `text` is that of all `token_ids`, but for special tokens; `top_token_ids` are the ids of
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
    """Batched: all asks of a call are sampled together; answers in their order.

    Raises DataError for an ask that it cannot serve, RunError when nobody answers in time.
    """

    @property
    def abilities(self) -> frozenset[Ability]: ...

    async def __call__(self, asks: Sequence[SampleRequest]) -> list[SampleResult]: ...


def require(sampler: Sampler, strategy: str, *needed: Ability) -> None:
    """Raise DataError, before anything is sampled, where the sampler lacks what is needed."""
    lacking = sorted(set(needed) - sampler.abilities)
    if lacking:
        raise DataError(
            f"{strategy} needs a backend that tells or takes {', '.join(lacking)}, and this one "
            "does not; use the mesh's generators or vLLM, or a strategy that looks at texts alone "
            "(chain_of_thought, self_consistency, rsa)"
        )
