"""Sample whole responses and choose by their answers alone, with any backend."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from pydantic import Field
from pydantic_core import to_jsonable_python

from cartridge_forge.plugins.clinic.findings import answer_parts, part_list, says_parts
from cartridge_forge.plugins.strategies.answers.extract import extract
from cartridge_forge.plugins.strategies.answers.votes import tally
from cartridge_forge.plugins.strategies.problem import StrategyCost, StrategyProblem, StrategyResult
from cartridge_forge.plugins.strategies.samplers.token_budget import TokenBudget
from cartridge_forge.protocols.spec.base import SpecSection


class ChainOfThought(SpecSection):
    """Sample one response."""

    def cost(self) -> StrategyCost:
        return StrategyCost(1, 1)

    async def solve(self, meter: TokenBudget, question: StrategyProblem) -> StrategyResult:
        (result,) = await meter([question.ask("0")])
        answer = extract(result.text, question.form)
        return StrategyResult(
            result.text, answer, meter.spent, result.finish_reason, result.token_ids
        )


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


class PartVote(SpecSection):
    """Choose for every part of a list the value that most responses of one call give it.

    An answer's parts are separated by commas, and a part's first word names it: "sodium 41 mmol,
    ecg normal". Only names that are words of the question count, and they are listed in its order.
    The response is written from the chosen parts, so it has no token ids.
    """

    samples: int = Field(default=16, ge=1, description="responses whose parts vote")

    def cost(self) -> StrategyCost:
        return StrategyCost(self.samples, self.samples)

    async def solve(self, meter: TokenBudget, question: StrategyProblem) -> StrategyResult:
        traces = await meter([question.ask(str(i)) for i in range(self.samples)])
        answers = [extract(t.text, question.form) for t in traces]
        votes: dict[str, Counter[str]] = defaultdict(Counter)
        for answer in answers:
            for name, value in answer_parts(answer or "").items():
                votes[name][value] += 1
        words = dict.fromkeys(re.findall(r"\w+", question.messages[-1].content.lower()))
        # Of values with as many votes the first that was given stands first.
        chosen = {name: votes[name].most_common(1)[0][0] for name in words if name in votes}
        details = {"answers": answers, "votes": {name: dict(votes[name]) for name in chosen}}
        if not chosen:
            first = traces[0]
            return StrategyResult(
                first.text, None, meter.spent, first.finish_reason, first.token_ids, details
            )
        return StrategyResult(
            says_parts(chosen), part_list(chosen), meter.spent, "stop", details=details
        )
