"""What a strategy spends, and the hard budget that it never exceeds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from strategies.samplers.sampler import Ability, Sampler, SampleRequest, SampleResult


class BudgetSpent(Exception):
    """No token is left to sample: a strategy answers with what it has."""


@dataclass(frozen=True)
class TokenSpend:
    """`tokens` sampled, `prompt_tokens` read, batched `calls` of `asks` in all, wall seconds."""

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
    """A `Sampler` that counts, and never lets more than `budget` tokens be sampled in all.

    The asks of a call share what is left: where it does not reach, the longest allowances are cut
    to the same length, so that no answer can take what another needs; one that such a cut ends has
    the finish reason "budget". Raises BudgetSpent for a call that would not have one token an ask.
    """

    def __init__(self, sampler: Sampler, budget: int | None = None) -> None:
        self._sampler = sampler
        self._account = SpendCounter(budget)

    def beside(self, sampler: Sampler) -> TokenBudget:
        """A meter over another sampler (a judge), on the same account."""
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
        """Tokens that may still be sampled; None without a budget."""
        account = self._account
        return None if account.budget is None else account.budget - account.spent.tokens

    async def __call__(self, asks: Sequence[SampleRequest]) -> list[SampleResult]:
        if not asks:
            return []
        allowed = self._within(asks)
        answers = await self._sampler(allowed)
        spent = self._account.spent
        self._account.spent = TokenSpend(
            spent.tokens + sum(a.tokens for a in answers),
            spent.prompt_tokens + sum(a.prompt_tokens for a in answers),
            spent.calls + 1,
            spent.asks + len(asks),
        )
        return [
            replace(answer, finish_reason="budget")
            if answer.finish_reason == "length" and given.sampling != asked.sampling
            else answer
            for asked, given, answer in zip(asks, allowed, answers, strict=True)
        ]

    def _within(self, asks: Sequence[SampleRequest]) -> list[SampleRequest]:
        left = self.left
        if left is None:
            return list(asks)
        if left < len(asks):
            budget = self._account.budget
            raise BudgetSpent(f"{left} of {budget} tokens are left for {len(asks)} responses")
        # Water-filling: short allowances stay whole, the others share what those leave.
        remaining, most = left, 0
        for i, allowance in enumerate(sorted(a.sampling.max_tokens for a in asks)):
            most = remaining // (len(asks) - i)
            if allowance > most:
                break
            remaining -= allowance
            most = allowance
        return [
            replace(a, sampling=replace(a.sampling, max_tokens=min(a.sampling.max_tokens, most)))
            for a in asks
        ]
