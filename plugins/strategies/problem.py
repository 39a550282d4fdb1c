"""Describe what a strategy solves (messages, sampling, one seed for all draws) and returns."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.strategies.answers.extract import Form
from cartridge_forge.plugins.strategies.samplers.sampler import PartialResponse, SampleRequest
from cartridge_forge.plugins.strategies.samplers.token_budget import TokenSpend
from cartridge_forge.protocols.step import Sampling, StopCondition, stream_seed

Judge = Callable[[Sequence[str]], Awaitable[Sequence[float]]]
"""Return for each text the probability that its last step is good (process reward model)."""


@dataclass(frozen=True)
class StrategyCost:
    """Bound what a strategy asks of a sampler: `sequences` of one call, `responses` in all. Each
    reads the messages, `again` responses of before, its own beginning included, and `words` tokens
    of the strategy's own prompts."""

    sequences: int
    responses: int
    again: int = 0
    words: int = 0


@dataclass(frozen=True)
class StrategyProblem:
    """Hold `StrategyProblem((AgentMessage("user", "what is 2 + 2?"),), "math", 7, Sampling(0.7,
    max_tokens=512))`.

    `sampling.max_tokens` bounds one whole response. Every draw depends only on `seed`, `name` and
    the draw's name. `judge` serves strategies whose scorer is "process_reward".
    """

    messages: tuple[AgentMessage, ...]
    form: Form
    seed: int
    sampling: Sampling
    name: str = "question"
    judge: Judge | None = None

    def ask(
        self,
        name: str,
        *,
        partial: PartialResponse | None = None,
        until: StopCondition | None = None,
        top_logprobs: int = 0,
        most: int | None = None,
    ) -> SampleRequest:
        """Return the request "question/`name`" for at most `most` tokens, or a whole response."""
        sampling = self.sampling if most is None else replace(self.sampling, max_tokens=most)
        name = f"{self.name}/{name}"
        seed = stream_seed(f"{self.seed}/{name}")
        return SampleRequest(
            name, self.messages, sampling, seed, partial or PartialResponse(), until, top_logprobs
        )  # fmt: skip

    def stream(self, name: str) -> random.Random:
        """Return a random generator for the strategy's own draws."""
        return random.Random(f"{self.seed}/{self.name}/{name}")


@dataclass(frozen=True)
class StrategyResult:
    """Hold the chosen response, the answer in it (None: none), the spend and the details.

    `details` are plain JSON values: votes, steps with their scores, populations. `finish_reason` is
    that of the chosen response, or "budget" if the token budget ended the strategy. `token_ids` are
    exact where the backend returns them, else empty.
    """

    text: str
    answer: str | None
    spent: TokenSpend
    finish_reason: str
    token_ids: tuple[int, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
