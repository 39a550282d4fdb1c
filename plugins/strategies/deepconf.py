"""Let the surest traces vote, weighted by confidence: DeepConf (Fu et al. 2025).

    offline   N traces --confidence--> the surest share votes, weighted by confidence
    online    warm-up traces --> s, the lowest group of the last one that is kept
              further traces, each stopped at its first full window below s
              warm-up and surviving traces vote; with `consensus` further ones are sampled in
              batches, until the leading answer cannot be overtaken

The weight of a future trace has no bound (one sure token outweighs any number of unsure ones), so
each is assumed to weigh as much as the heaviest so far.

Confidences are of log-probabilities; higher is surer.

    token    c_i = -mean of the top-k log-probabilities at position i
    group    mean of c over each window of w tokens; a shorter trace is one group
    trace    mean           over all tokens
             tail           over the last w tokens
             lowest_group   the least sure group
             lowest_tenth   mean of the least sure 10% of the groups, at least one
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import to_jsonable_python

from cartridge_forge.plugins.strategies.answers.extract import extract
from cartridge_forge.plugins.strategies.answers.votes import AnswerVote, surest, tally
from cartridge_forge.plugins.strategies.problem import StrategyCost, StrategyProblem, StrategyResult
from cartridge_forge.plugins.strategies.samplers.sampler import SampleResult, require
from cartridge_forge.plugins.strategies.samplers.token_budget import BudgetSpent, TokenBudget
from cartridge_forge.protocols.spec.base import SpecSection, broken
from cartridge_forge.protocols.step import StopCondition

Measure = Literal["mean", "tail", "lowest_group", "lowest_tenth"]

# Nats. Confidences depend on the batch in their last bits; a trace equal to that of the threshold
# must not be stopped for this.
ROUNDING = 1e-3


@dataclass(frozen=True)
class RunningTrace:
    """Hold a sampled trace with its answer and confidences, in nats."""

    said: SampleResult
    answer: str | None
    confidence: float  # by the measure that weighs votes
    lowest: float  # of its groups, compared with the threshold


class DeepConf(SpecSection):
    """Let the surest traces vote, weighted by their confidence."""

    mode: Literal["offline", "online"] = Field(
        default="offline", description="online: stop traces that are unsure"
    )
    traces: int = Field(default=32, ge=1, description="traces in all, warm-up included")
    measure: Measure = Field(default="lowest_group", description="what a trace's confidence is")
    window: int = Field(default=2048, ge=1, description="tokens of a group, and of the tail")
    top: int = Field(
        default=20, ge=1, le=1024, description="log-probabilities behind a token's confidence"
    )
    keep_fraction: float = Field(
        default=0.1, gt=0, le=1, description="share of the traces, the surest, that vote"
    )
    warmup: int = Field(default=16, ge=1, description="online: traces that set the threshold")
    consensus: bool = Field(
        default=False, description="online: stop when the answer cannot be overtaken"
    )
    batch: int = Field(default=8, ge=1, description="traces a call, with consensus")

    @field_validator("warmup")
    @classmethod
    def _leaves_some(cls, warmup: int, info: ValidationInfo) -> int:
        traces = info.data.get("traces", warmup + 1)
        if info.data.get("mode") == "online" and warmup >= traces:
            raise broken(f"must be < traces ({traces})", "lower it, or no trace is ever stopped")
        return warmup

    def cost(self) -> StrategyCost:
        if self.mode == "offline":
            return StrategyCost(self.traces, self.traces)
        further = self.traces - self.warmup
        return StrategyCost(
            max(self.warmup, min(self.batch, further) if self.consensus else further), self.traces
        )

    async def solve(self, meter: TokenBudget, question: StrategyProblem) -> StrategyResult:
        if self.mode == "online":
            require(meter, "deepconf (online)", "top_logprobs", "confidence")
            return await self._online(meter, question)
        require(meter, "deepconf", "top_logprobs")
        traces = await self._sample(meter, question, range(self.traces))
        indices = surest([t.confidence for t in traces], self.keep_fraction)
        return await self._voted(meter, question, traces, indices, {})

    async def _online(self, meter: TokenBudget, question: StrategyProblem) -> StrategyResult:
        traces = await self._sample(meter, question, range(self.warmup))
        lowest = [t.lowest for t in traces]
        floor = min(lowest[i] for i in surest(lowest, self.keep_fraction))
        until = StopCondition(window=self.window, floor=floor - ROUNDING, top=self.top)
        details: dict[str, object] = {"threshold": floor, "warmup": self.warmup}
        while len(traces) < self.traces:
            if self.consensus and await self._decided(traces, question):
                details["consensus"] = True
                break
            more = self.batch if self.consensus else self.traces
            indices = range(len(traces), min(len(traces) + more, self.traces))
            try:
                traces += await self._sample(meter, question, indices, until)
            except BudgetSpent:
                details["budget_spent"] = True
                break
        return await self._voted(meter, question, traces, _surviving(traces), details)

    async def _sample(
        self,
        meter: TokenBudget,
        question: StrategyProblem,
        which: range,
        until: StopCondition | None = None,
    ) -> list[RunningTrace]:
        requests = [question.ask(str(i), until=until, top_logprobs=self.top) for i in which]
        traces = []
        for result in await meter(requests):
            confidences = token_confidences(result.top_logprobs, self.top)
            traces.append(
                RunningTrace(
                    result,
                    extract(result.text, question.form),
                    trace_confidence(confidences, self.measure, self.window),
                    trace_confidence(confidences, "lowest_group", self.window),
                )
            )
        return traces

    async def _decided(self, traces: list[RunningTrace], question: StrategyProblem) -> bool:
        votes = await _votes(traces, _surviving(traces), question)
        if not votes:
            return False
        second = votes[1].weight if len(votes) > 1 else 0.0
        heaviest = max(t.confidence for t in traces)
        return votes[0].weight - second > (self.traces - len(traces)) * heaviest

    async def _voted(
        self,
        meter: TokenBudget,
        question: StrategyProblem,
        traces: list[RunningTrace],
        indices: list[int],
        details: dict[str, object],
    ) -> StrategyResult:
        votes = await _votes(traces, indices, question)
        voters = votes[0].traces if votes else indices
        chosen = traces[max(voters, key=lambda i: (traces[i].confidence, -i))].said
        details |= {
            "traces": [
                {
                    "answer": t.answer,
                    "confidence": t.confidence,
                    "tokens": t.said.tokens,
                    "stopped": _stopped(t),
                }
                for t in traces
            ],
            "kept": indices,
            "votes": to_jsonable_python(votes),
        }
        spent = "budget_spent" in details
        return StrategyResult(
            chosen.text, votes[0].answer if votes else None, meter.spent,
            "budget" if spent else chosen.finish_reason, chosen.token_ids, details,
        )  # fmt: skip


def token_confidences(top_logprobs: Sequence[Sequence[tuple[str, float]]], k: int) -> list[float]:
    """Return each token's confidence in nats, over at most `k` log-probabilities."""
    return [-fmean(logprob for _, logprob in candidates[:k]) for candidates in top_logprobs]


def group_confidences(confidences: Sequence[float], window: int) -> list[float]:
    """Return the mean of each window of `window` tokens, in order; of all tokens if fewer.

    `group_confidences([1, 2, 3, 6], 3)` is [2, 3 2/3].
    """
    if len(confidences) < window:
        return [fmean(confidences)] if confidences else []
    sums = [0.0, *accumulate(confidences)]
    return [(sums[i + window] - sums[i]) / window for i in range(len(confidences) - window + 1)]


def trace_confidence(confidences: Sequence[float], measure: Measure, window: int) -> float:
    """Return the confidence of a whole trace, in nats; 0 for one without tokens."""
    if not confidences:
        return 0.0
    if measure == "mean":
        return fmean(confidences)
    if measure == "tail":
        return fmean(confidences[-window:])
    groups = sorted(group_confidences(confidences, window))
    if measure == "lowest_group":
        return groups[0]
    return math.fsum(lowest := groups[: max(len(groups) // 10, 1)]) / len(lowest)


def _stopped(trace: RunningTrace) -> bool:
    return trace.said.ended_by == "confidence"


def _surviving(traces: list[RunningTrace]) -> list[int]:
    return [i for i, t in enumerate(traces) if not _stopped(t)]


async def _votes(
    traces: list[RunningTrace], indices: list[int], question: StrategyProblem
) -> list[AnswerVote]:
    """Return the votes of the kept traces, with their indices among all traces."""
    answers = [t.answer if i in indices else None for i, t in enumerate(traces)]
    return await tally(answers, question.form, [t.confidence for t in traces])
