"""Count the tokens of a strategy, and enforce its token budget."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cartridge_forge.plugins.strategies.samplers.sampler import (
    Ability,
    Sampler,
    SampleRequest,
    SampleResult,
)


class BudgetSpent(Exception):
    """Signal that no token is left to sample; a strategy then returns what it has."""


@dataclass(frozen=True)
class TokenSpend:
    """Count `tokens` sampled, `prompt_tokens` read, `calls`, requests (`asks`) and `seconds`."""

    tokens: int = 0
    prompt_tokens: int = 0
    calls: int = 0
    asks: int = 0
    seconds: float = 0.0


@dataclass
class SpendCounter:
    budget: int | None
    spent: TokenSpend = TokenSpend()
    begun: float = field(default_factory=time.perf_counter)


class TokenBudget:
    """Wrap a `Sampler`, count its tokens, and never sample more than `budget` tokens in all.

    The requests of a call share the remaining tokens. If these do not suffice, the largest limits
    are cut to one length, so that no response takes tokens from a shorter one. A response that this
    cut ends has the finish reason "budget". Raises BudgetSpent for fewer tokens than requests.
    """

    def __init__(self, sampler: Sampler, budget: int | None = None) -> None:
        self._sampler = sampler
        self._account = SpendCounter(budget)

    def beside(self, sampler: Sampler) -> TokenBudget:
        """Return a wrapper of another sampler, for example a judge, that shares this budget."""
        other = TokenBudget(sampler)
        other._account = self._account
        return other

    @property
    def abilities(self) -> frozenset[Ability]:
        return self._sampler.abilities

    @property
    def spent(self) -> TokenSpend:
        account = self._account
        return replace(account.spent, seconds=time.perf_counter() - account.begun)

    @property
    def left(self) -> int | None:
        """Return the remaining tokens; None without a budget."""
        account = self._account
        return None if account.budget is None else account.budget - account.spent.tokens

    async def __call__(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        if not requests:
            return []
        allowed = self._within(requests)
        answers = await self._sampler(allowed)
        spent = self._account.spent
        self._account.spent = TokenSpend(
            spent.tokens + sum(a.tokens for a in answers),
            spent.prompt_tokens + sum(a.prompt_tokens for a in answers),
            spent.calls + 1,
            spent.asks + len(requests),
        )
        return [
            replace(answer, finish_reason="budget")
            if answer.finish_reason == "length" and limited.sampling != request.sampling
            else answer
            for request, limited, answer in zip(requests, allowed, answers, strict=True)
        ]

    def _within(self, requests: Sequence[SampleRequest]) -> list[SampleRequest]:
        available = self.left
        if available is None:
            return list(requests)
        if available < len(requests):
            budget = self._account.budget
            raise BudgetSpent(
                f"{available} of {budget} tokens are left for {len(requests)} responses"
            )
        # Water-filling: small limits stay, the others share the rest.
        remaining, most = available, 0
        for i, allowance in enumerate(sorted(a.sampling.max_tokens for a in requests)):
            most = remaining // (len(requests) - i)
            if allowance > most:
                break
            remaining -= allowance
            most = allowance
        return [
            replace(a, sampling=replace(a.sampling, max_tokens=min(a.sampling.max_tokens, most)))
            for a in requests
        ]
