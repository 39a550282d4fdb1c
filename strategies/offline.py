"""Sample whole responses and choose by their answers alone, with any backend."""

from __future__ import annotations

from pydantic import Field
from pydantic_core import to_jsonable_python

from protocols.spec.base import SpecSection
from strategies.answers.extract import extract
from strategies.answers.votes import tally
from strategies.problem import StrategyCost, StrategyProblem, StrategyResult
from strategies.samplers.token_budget import TokenBudget


class ChainOfThought(SpecSection):
    """Sample one response."""

    def cost(self) -> StrategyCost:
        return StrategyCost(1, 1)

    async def solve(self, meter: TokenBudget, question: StrategyProblem) -> StrategyResult:
        (said,) = await meter([question.ask("0")])
        answer = extract(said.text, question.form)
        return StrategyResult(said.text, answer, meter.spent, said.finish_reason, said.token_ids)


class SelfConsistency(SpecSection):
    """Choose the most frequent answer of several responses from one call (Wang et al. 2022)."""

    samples: int = Field(default=16, ge=1, description="responses that vote")

    def cost(self) -> StrategyCost:
        return StrategyCost(self.samples, self.samples)

    async def solve(self, meter: TokenBudget, question: StrategyProblem) -> StrategyResult:
        traces = await meter([question.ask(str(i)) for i in range(self.samples)])
        answers = [extract(t.text, question.form) for t in traces]
        votes = await tally(answers, question.form)
        chosen = traces[votes[0].traces[0] if votes else 0]
        return StrategyResult(
            chosen.text, votes[0].answer if votes else None, meter.spent, chosen.finish_reason,
            chosen.token_ids, {"answers": answers, "votes": to_jsonable_python(votes)},
        )  # fmt: skip
