"""Choose steps by the value of sampled look-aheads: phi decoding (Xu et al. 2025).

    B beams --R rollouts each (1 call)--> B x R steps, F = mean log-probability
      width     keep F > mean - deviation (all, where every F is equal)
      foresee   one look-ahead to the end from each that is kept (1 call), F' its mean
      weigh     advantage A = F' - F' of the beam's own look-ahead before; the look-aheads
                clustered by their words, C = share of the cluster
                weight = (softmax(A / 0.1) + softmax(C)) / 2
      depth     all look-aheads agree, or the largest cluster reaches the threshold: stop (a
                single look-ahead never agrees)
      sample    B of them without replacement, by weight

A step that ends the response is its own look-ahead. After a step with an empty answer the
look-ahead starts before that step and is the final answer. A look-ahead is a whole response. If
depth stops the search, the result is the heaviest look-ahead of the largest cluster, else that of
the heaviest of the last beams.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from pydantic import Field

from cartridge_forge.plugins.strategies.answers.extract import extract
from cartridge_forge.plugins.strategies.answers.votes import tally, text_clusters
from cartridge_forge.plugins.strategies.detectors import Detector
from cartridge_forge.plugins.strategies.problem import StrategyCost, StrategyProblem, StrategyResult
from cartridge_forge.plugins.strategies.samplers.sampler import SampleResult, require
from cartridge_forge.plugins.strategies.samplers.token_budget import BudgetSpent, TokenBudget
from cartridge_forge.plugins.strategies.scorers import NOTHING
from cartridge_forge.plugins.strategies.steps import StepPath, StepSampler, concluding, path_result
from cartridge_forge.protocols.spec.base import SpecSection

SHARPNESS = 0.1  # temperature of the advantages


@dataclass(frozen=True)
class PhiBeam:
    """Hold a path, its look-ahead (a whole response), and the look-ahead's F'."""

    path: StepPath = field(default_factory=StepPath)
    ahead: StepPath = field(default_factory=StepPath)
    value: float = 0.0


class PhiDecoding(SpecSection):
    """Sample steps weighted by the value and agreement of their look-aheads."""

    beams: int = Field(default=4, ge=1, description="paths that are kept")
    rollouts: int = Field(default=4, ge=1, description="candidate steps of a path")
    clusters: int = Field(default=3, ge=1, description="clusters of look-aheads, at most")
    threshold: float = Field(
        default=0.7, gt=0, le=1, description="share of the largest cluster that ends the search"
    )
    max_steps: int = Field(default=8, ge=1, description="steps that are foreseen")
    detector: Detector = Field(default=Detector(), description="where steps end")

    def cost(self) -> StrategyCost:
        grown = self.beams * self.rollouts  # and as many look-aheads
        return StrategyCost(grown, 2 * grown * self.max_steps, again=1)

    async def solve(self, meter: TokenBudget, question: StrategyProblem) -> StrategyResult:
        require(meter, "phi_decoding", "continue", "until", "logprobs")
        stepper = StepSampler(meter, question, self.detector)
        beams, best = [PhiBeam()] * self.beams, PhiBeam()
        log: list[dict[str, Any]] = []
        spent = False
        try:
            for t in range(self.max_steps):
                kept_paths = await self._kept(stepper, beams, t)
                if not best.ahead.steps:  # the result if the budget ends before the look-aheads
                    best = PhiBeam(ahead=concluding(kept_paths[0][0]))
                foreseen = [(b, 0.0) for b in beams if b.path.state == "done"]
                foreseen += await self._foreseen(stepper, kept_paths, t)
                ahead = [b for b, _ in foreseen]
                labels = text_clusters(
                    [b.ahead.steps[-1].text for b in ahead],
                    self.clusters,
                    question.stream(f"clusters/{t}"),
                )
                weights = weigh([a for _, a in foreseen], labels)
                largest, share = _largest(labels)
                agree = await _agree([b.ahead for b in ahead], question)
                stop = len(ahead) > 1 and (agree or share >= self.threshold)
                log.append(_logged(foreseen, labels, weights, stop))
                if stop:
                    inside = [i for i, label in enumerate(labels) if agree or label == largest]
                    best = ahead[max(inside, key=lambda i: (weights[i], -i))]
                    break
                chosen = sample(weights, self.beams, question.stream(f"beams/{t}"))
                beams = [ahead[i] for i in chosen]
                best = ahead[max(chosen, key=lambda i: (weights[i], -i))]
                if all(b.path.state == "done" for b in beams):
                    break
        except BudgetSpent:
            spent = True
        return path_result(best.ahead, meter, question, {"log": log}, spent=spent)

    async def _kept(
        self, stepper: StepSampler, beams: Sequence[PhiBeam], t: int
    ) -> list[tuple[StepPath, float]]:
        """Return the steps that width keeps, each with the value of its beam."""
        on = [b for b in beams if b.path.state != "done"]
        grown = await stepper.sample([b.path for b in on], self.rollouts, f"step/{t}")
        steps = [(p, b.value) for b, of_beam in zip(on, grown, strict=True) for p in of_beam]
        return [steps[i] for i in width([_mean(p.steps[-1]) for p, _ in steps])]

    async def _foreseen(
        self, stepper: StepSampler, paths: Sequence[tuple[StepPath, float]], t: int
    ) -> list[tuple[PhiBeam, float]]:
        """Return the beams after these steps, each with its advantage."""
        open_ = [p for p, _ in paths if p.state != "done"]
        endings = iter(
            await stepper.sample([concluding(p) for p in open_], 1, f"ahead/{t}", to_end=True)
        )
        foreseen = []
        for path, value in paths:
            if path.state == "done":
                beam = PhiBeam(path, path, _mean(path.steps[-1]))
            else:
                (ahead,) = next(endings)
                # After an empty answer the look-ahead is the final answer, and the path ends.
                beam = PhiBeam(
                    ahead if path.state == "empty" else path, ahead, _mean(ahead.steps[-1])
                )
            foreseen.append((beam, beam.value - value))
        return foreseen


def width(values: Sequence[float]) -> list[int]:
    """Return the indices of the values above mean - deviation; all where they are equal."""
    floor = fmean(values) - pstdev(values)
    return [i for i, v in enumerate(values) if v > floor] or list(range(len(values)))


def weigh(advantages: Sequence[float], labels: Sequence[int]) -> list[float]:
    """Return (softmax(A / 0.1) + softmax(C)) / 2, which sums to 1; C is the share of each cluster.

    `weigh([0.0, 0.0], [0, 1])` is [0.5, 0.5].
    """
    sizes = Counter(labels)
    promise = _softmax([a / SHARPNESS for a in advantages])
    company = _softmax([sizes[label] / len(labels) for label in labels])
    return [(a + c) / 2 for a, c in zip(promise, company, strict=True)]


def sample(weights: Sequence[float], count: int, rng: random.Random) -> list[int]:
    """Draw `count` distinct indices by weight, in the order drawn; all if there are no more."""
    remaining = dict(enumerate(weights))
    drawn: list[int] = []
    while remaining and len(drawn) < count:
        (i,) = rng.choices(list(remaining), list(remaining.values()))
        drawn.append(i)
        del remaining[i]
    return drawn


def _softmax(values: Sequence[float]) -> list[float]:
    most = max(values)
    exps = [math.exp(v - most) for v in values]
    return [e / math.fsum(exps) for e in exps]


def _mean(result: SampleResult) -> float:
    return fmean(result.logprobs) if result.logprobs else NOTHING


def _largest(labels: Sequence[int]) -> tuple[int, float]:
    """Return the largest cluster, of equals the first, and its share."""
    label, size = Counter(labels).most_common(1)[0]
    return label, size / len(labels)


async def _agree(aheads: Sequence[StepPath], question: StrategyProblem) -> bool:
    """Return whether every look-ahead has an answer, and all are equal."""
    votes = await tally([extract(a.text, question.form) for a in aheads], question.form)
    return bool(votes) and len(votes[0].traces) == len(aheads)


def _logged(
    foreseen: Sequence[tuple[PhiBeam, float]],
    labels: Sequence[int],
    weights: Sequence[float],
    stop: bool,
) -> dict[str, Any]:
    return {
        "candidates": [
            {"text": b.path.steps[-1].text, "advantage": a, "cluster": label, "weight": weight}
            for (b, a), label, weight in zip(foreseen, labels, weights, strict=True)
        ],
        "stopped": stop,
    }
