"""Offer recursive self-aggregation as a strategy of `strategies.catalog`."""

from __future__ import annotations

from pydantic import Field

from protocols.spec.base import SpecSection
from strategies.problem import StrategyProblem
from strategies.result import StrategyResult
from strategies.rsa.engine import evolve
from strategies.rsa.islands import RSAShape
from strategies.samplers.token_budget import BudgetSpent, TokenBudget


class RecursiveSelfAggregation(SpecSection):
    """Evolve M islands of N candidates, each made of K, over T populations; the last one votes."""

    M: int = Field(default=1, ge=1, description="islands, a power of two")
    N: int = Field(default=4, ge=1, description="candidates of an island")
    K: int = Field(default=2, ge=1, description="candidates that are aggregated into one")
    T: int = Field(default=3, ge=1, description="populations, the first included")

    async def solve(self, meter: TokenBudget, question: StrategyProblem) -> StrategyResult:
        """Return the majority's response. Raises DataError for inconsistent numbers, BudgetSpent
        without a first population."""
        shape = RSAShape(self.M, self.N, self.K, self.T)
        (run,) = await evolve(meter, [question], shape)
        if not run.populations:
            raise BudgetSpent("no token is left for a first population")
        last, slot = run.populations[-1], run.chosen or 0
        details = {
            "populations": [population.as_dict() for population in run.populations],
            "votes": [vote.plain() for vote in run.votes],
        }
        reason = run.finish_reason or last.finish_reasons[slot]
        return StrategyResult(
            last.texts[slot], run.answer, meter.spent, reason, last.token_ids[slot], details
        )
