"""Search over steps: expand, score, keep the best. Best-of-N is the search with one beam.

    B active paths --C candidates each (1 call)--> B x C --scorer, aggregate--> ranked
      from the top: finished paths are set aside, until B are active or B set aside
      a path that stops at an empty answer loses that step; C final answers, the best stays
    ends with B set aside, with none active, with `max_steps`, or with the budget
    nothing set aside: C final answers to the best active path

The aggregate "sum" favours long or short paths, by the sign of the scores; "mean" favours neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.plugins.strategies.detectors import Detector
from cartridge_forge.plugins.strategies.problem import StrategyCost, StrategyProblem, StrategyResult
from cartridge_forge.plugins.strategies.samplers.sampler import require
from cartridge_forge.plugins.strategies.samplers.token_budget import BudgetSpent, TokenBudget
from cartridge_forge.plugins.strategies.scorers import NOTHING, Scorer, ScorerName, scorer
from cartridge_forge.plugins.strategies.steps import StepPath, StepSampler, concluding, path_result
from cartridge_forge.protocols.spec.base import SpecSection, broken

Aggregate = Literal["last", "mean", "sum", "product", "min", "max"]
AGGREGATES: dict[Aggregate, Callable[[Sequence[float]], float]] = {
    "last": lambda scores: scores[-1],
    "mean": fmean,
    "sum": sum,
    "product": math.prod,
    "min": min,
    "max": max,
}


class BestOfN(SpecSection):
    """Choose the best of several candidates at every step."""

    candidates: int = Field(default=4, ge=1, description="candidates of a step")
    max_steps: int = Field(default=32, ge=1, description="steps before the final answer")
    scorer: ScorerName = Field(default="perplexity", description="what a step is chosen by")
    detector: Detector = Field(default=Detector(), description="where steps end")

    def cost(self) -> StrategyCost:
        return _cost(self, 1)

    async def solve(self, meter: TokenBudget, question: StrategyProblem) -> StrategyResult:
        return await _search(self, meter, question, 1, "last")


class BeamSearch(SpecSection):
    """Keep several paths at once, ranked by all their steps."""

    beams: int = Field(default=2, ge=1, description="paths that stay active")
    candidates: int = Field(default=4, ge=1, description="candidates of a path's next step")
    max_steps: int = Field(default=32, ge=1, description="steps before the final answer")
    aggregate: Aggregate = Field(default="mean", description="a path's rank from its steps' scores")
    scorer: ScorerName = Field(default="perplexity", description="how a step is scored")
    detector: Detector = Field(default=Detector(), description="where steps end")

    @field_validator("scorer")
    @classmethod
    def _may_be_multiplied(cls, name: ScorerName, info: ValidationInfo) -> ScorerName:
        if info.data.get("aggregate") == "product" and name not in ("gap", "process_reward"):
            raise broken(
                "must be gap or process_reward with the aggregate product: the product of "
                "negative scores ranks nothing",
                "take the aggregate sum or mean",
            )
        return name

    def cost(self) -> StrategyCost:
        return _cost(self, self.beams)

    async def solve(self, meter: TokenBudget, question: StrategyProblem) -> StrategyResult:
        return await _search(self, meter, question, self.beams, self.aggregate)


def _cost(strategy: BestOfN | BeamSearch, beams: int) -> StrategyCost:
    """Return the bound: every step grows each beam, and each beam concludes once."""
    grown = beams * strategy.candidates
    return StrategyCost(grown, grown * (strategy.max_steps + 1), again=1)


async def _search(
    strategy: BestOfN | BeamSearch,
    meter: TokenBudget,
    question: StrategyProblem,
    beams: int,
    aggregate: Aggregate,
) -> StrategyResult:
    by, rank, count = scorer(strategy.scorer, question), AGGREGATES[aggregate], strategy.candidates
    name = "best_of_n" if isinstance(strategy, BestOfN) else "beam_search"
    require(meter, name, "continue", "until", *by.needs)
    stepper = StepSampler(meter, question, strategy.detector, by.top_logprobs)
    active: list[StepPath] = [StepPath()]
    aside: list[StepPath] = []
    unanswered: list[StepPath] = []
    log: list[dict[str, int]] = []
    spent = False
    try:
        for t in range(strategy.max_steps):
            grown = await scored_candidates(stepper, by, active, count, f"step/{t}")
            active, dropped = _kept(best_first(grown, rank), beams, beams - len(aside))
            aside += [p for p in dropped if p.state == "done"]
            unanswered = [p for p in dropped if p.state == "empty"]
            log.append(
                {
                    "candidates": len(grown),
                    "active": len(active),
                    "done": len(dropped) - len(unanswered),
                    "empty": len(unanswered),
                }
            )
            aside += await conclude(stepper, by, unanswered, count, f"final/{t}")
            if len(aside) >= beams or not active:
                break
        if not aside:
            aside = await conclude(stepper, by, active[:1], count, "final")
    except BudgetSpent:
        spent = True
    chosen = best_first(aside or [*active, *map(concluding, unanswered)], rank)[0]
    details = {"log": log, "finished": [_plain(p, rank) for p in aside]}
    return path_result(chosen, meter, question, details, spent=spent)


def _kept(
    ranked: Sequence[StepPath], beams: int, room: int
) -> tuple[list[StepPath], list[StepPath]]:
    """Return active and ended paths from the top, until there are `beams` or `room` of them."""
    active: list[StepPath] = []
    dropped: list[StepPath] = []
    for path in ranked:
        (active if path.state == "on" else dropped).append(path)
        if len(active) == beams or len(dropped) == room:
            break
    return active, dropped


async def scored_candidates(
    stepper: StepSampler, by: Scorer, paths: Sequence[StepPath], count: int, name: str
) -> list[StepPath]:
    """Return `count` scored next steps of each path, path by path. Raises BudgetSpent."""
    grown = [c for of_path in await stepper.sample(paths, count, name) for c in of_path]
    return [p.scored(s) for p, s in zip(grown, await by.score(grown), strict=True)]


async def conclude(
    stepper: StepSampler, by: Scorer, paths: Sequence[StepPath], count: int, name: str
) -> list[StepPath]:
    """Return the best of `count` final answers of each path, without a last step that stopped at an
    empty answer. Raises BudgetSpent."""
    if not paths:
        return []
    endings = await stepper.sample([concluding(p) for p in paths], count, name, to_end=True)
    flat = [e for of_path in endings for e in of_path]
    scores = iter(await by.score(flat))
    best = []
    for of_path in endings:
        scored = [e.scored(next(scores)) for e in of_path]
        best.append(best_first(scored, lambda s: s[-1])[0])
    return best


def best_first(
    paths: Sequence[StepPath], rank: Callable[[Sequence[float]], float]
) -> list[StepPath]:
    """Return the paths by rank, of equals the earliest first, paths without steps last."""
    return sorted(paths, key=lambda p: -(rank(p.scores) if p.scores else NOTHING))


def _plain(path: StepPath, rank: Callable[[Sequence[float]], float]) -> dict[str, Any]:
    return {"text": path.text, "tokens": path.tokens, "score": rank(path.scores)}
