"""Sample further candidates only at steps where the model is less sure than before.

    probe step: u = -mean log-probability of its tokens, m the momentum of u so far
      t = 0, or exp(m) / gamma >= exp(u)   keep the probe
      else                                 N - 1 more candidates (1 call), the best by the scorer
    m <- alpha * m + (1 - alpha) * u of the probe

Source: momentum uncertainty (Yan et al. 2025). m starts at 0 and is too low for some steps: with a
constant u = 0.3, steps 1 to 9 are scaled. "bias_corrected" divides m by 1 - alpha^t (as Adam does)
and scales none of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from pydantic import Field

from cartridge_forge.plugins.strategies.detectors import Detector
from cartridge_forge.plugins.strategies.problem import StrategyCost, StrategyProblem, StrategyResult
from cartridge_forge.plugins.strategies.samplers.sampler import require
from cartridge_forge.plugins.strategies.samplers.token_budget import BudgetSpent, TokenBudget
from cartridge_forge.plugins.strategies.scorers import ScorerName, scorer
from cartridge_forge.plugins.strategies.search import best_first, conclude, scored_candidates
from cartridge_forge.plugins.strategies.steps import StepPath, StepSampler, concluding, path_result
from cartridge_forge.protocols.spec.base import SpecSection


@dataclass(frozen=True)
class Momentum:
    """Hold the running mean of a path's uncertainty, in nats, after `steps` steps."""

    alpha: float
    gamma: float
    corrected: bool
    value: float = 0.0
    steps: int = 0

    def scales(self, uncertainty: float) -> bool:
        """Return whether a probe this unsure gets more candidates; the first never does."""
        if self.steps == 0:
            return False
        usual = self.value / (1 - self.alpha**self.steps) if self.corrected else self.value
        return usual - math.log(self.gamma) < uncertainty

    def after(self, uncertainty: float) -> Momentum:
        value = self.alpha * self.value + (1 - self.alpha) * uncertainty
        return Momentum(self.alpha, self.gamma, self.corrected, value, self.steps + 1)


class AdaptiveScaling(SpecSection):
    """Sample N candidates at steps where the model is unsure, one elsewhere."""

    candidates: int = Field(default=4, ge=2, description="candidates of an unsure step")
    alpha: float = Field(default=0.9, ge=0, lt=1, description="weight of the past in the momentum")
    gamma: float = Field(
        default=0.9, gt=0, le=1, description="how much less sure a step must be: 1 is any less"
    )
    momentum: Literal["plain", "bias_corrected"] = Field(
        default="plain", description="bias_corrected: does not lag behind at the start"
    )
    max_steps: int = Field(default=32, ge=1, description="steps before the final answer")
    scorer: ScorerName = Field(default="perplexity", description="what a step is chosen by")
    detector: Detector = Field(default=Detector(), description="where steps end")

    def cost(self) -> StrategyCost:
        return StrategyCost(self.candidates, self.candidates * (self.max_steps + 1), again=1)

    async def solve(self, meter: TokenBudget, question: StrategyProblem) -> StrategyResult:
        by = scorer(self.scorer, question)
        require(meter, "adaptive_scaling", "continue", "until", "logprobs", *by.needs)
        stepper = StepSampler(meter, question, self.detector, by.top_logprobs)
        momentum = Momentum(self.alpha, self.gamma, self.momentum == "bias_corrected")
        path, spent = StepPath(), False
        log: list[dict[str, Any]] = []
        try:
            for t in range(self.max_steps):
                grown = await scored_candidates(stepper, by, [path], 1, f"probe/{t}")
                logprobs = grown[0].steps[-1].logprobs
                unsure = -fmean(logprobs) if logprobs else 0.0
                scaled = momentum.scales(unsure)
                log.append({"uncertainty": unsure, "momentum": momentum.value, "scaled": scaled})
                if scaled:
                    path = grown[0]  # the result if the budget ends here
                    more = self.candidates - 1
                    grown += await scored_candidates(
                        stepper, by, [path.before()], more, f"step/{t}"
                    )
                path = best_first(grown, lambda scores: scores[-1])[0]
                momentum = momentum.after(unsure)
                if path.state != "on":
                    break
            if path.state != "done":
                count = self.candidates
                path = (await conclude(stepper, by, [path], count, "final"))[0]
        except BudgetSpent:
            spent, path = True, concluding(path)
        return path_result(path, meter, question, {"log": log}, spent=spent)
