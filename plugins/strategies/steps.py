"""Extend several paths by candidate steps in one batched call.

    StepPath  "step 1 . step 2 ."  --SampleRequest(begun, until)-->  step 3a, 3b, 3c
      on      more steps may follow
      done    the end token, an answer, the response's last token, or the budget's
      empty   an answer pattern with nothing after it: the step is dropped, and a final answer
              sampled to the response's end (`concluding`); not after an end token

A path's text and ids are the concatenated outputs of the sampler, never tokenized again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from cartridge_forge.plugins.strategies.answers.extract import extract
from cartridge_forge.plugins.strategies.detectors import Detector
from cartridge_forge.plugins.strategies.problem import StrategyProblem, StrategyResult
from cartridge_forge.plugins.strategies.samplers.sampler import PartialResponse, SampleResult
from cartridge_forge.plugins.strategies.samplers.token_budget import TokenBudget

State = Literal["on", "done", "empty"]


@dataclass(frozen=True)
class StepPath:
    """Hold a partial response: its sampled steps, and the scores of those that were scored."""

    steps: tuple[SampleResult, ...] = ()
    scores: tuple[float, ...] = ()
    state: State = "on"

    @property
    def text(self) -> str:
        return "".join(s.text for s in self.steps)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return all ids, or none if the backend omits those of a step."""
        if any(s.text and not s.token_ids for s in self.steps):
            return ()
        return tuple(i for s in self.steps for i in s.token_ids)

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.steps)

    @property
    def finish_reason(self) -> str:
        return self.steps[-1].finish_reason if self.steps else ""

    def scored(self, score: float) -> StepPath:
        """Return the path with the last step's score."""
        return replace(self, scores=(*self.scores[: len(self.steps) - 1], score))

    def before(self) -> StepPath:
        """Return the path without its last step."""
        count = len(self.steps) - 1
        return StepPath(self.steps[:count], self.scores[:count])

    def plain(self) -> list[dict[str, Any]]:
        """Return JSON values: each step with its tokens, and its score or None."""
        scores = [*self.scores, *[None] * (len(self.steps) - len(self.scores))]
        return [
            {"text": s.text, "tokens": s.tokens, "score": score}
            for s, score in zip(self.steps, scores, strict=True)
        ]


@dataclass(frozen=True)
class StepSampler:
    """Sample steps for one question."""

    meter: TokenBudget
    question: StrategyProblem
    detector: Detector
    top_logprobs: int = 0

    async def sample(
        self, paths: Sequence[StepPath], count: int, name: str, *, to_end: bool = False
    ) -> list[list[StepPath]]:
        """Return `count` next steps of each path from one call, drawn by `name`; completions with
        `to_end`. Raises BudgetSpent."""
        requests = []
        for p, path in enumerate(paths):
            text, remaining = path.text, self.question.sampling.max_tokens - path.tokens
            until = None if to_end else self.detector.until(text, self.question.form)
            requests += [
                self.question.ask(
                    f"{name}/{p}/{c}",
                    partial=PartialResponse(text, path.token_ids),
                    until=until,
                    top_logprobs=self.top_logprobs,
                    most=min(remaining, self.detector.max_tokens) if until else remaining,
                )
                for c in range(count)
            ]
        results = await self.meter(requests)
        return [
            [self._longer(path, s, to_end) for s in results[p * count : (p + 1) * count]]
            for p, path in enumerate(paths)
        ]

    def _longer(self, path: StepPath, result: SampleResult, to_end: bool) -> StepPath:
        longer = StepPath((*path.steps, result), path.scores)
        return replace(longer, state="done" if to_end else self._state(path, longer, result))

    def _state(self, path: StepPath, longer: StepPath, result: SampleResult) -> State:
        if result.finish_reason not in ("until", "length"):
            return "done"
        answered = self.detector.answered(path.text, result.text, self.question.form)
        if answered is not None:
            return "done" if answered else "empty"
        return "done" if longer.tokens >= self.question.sampling.max_tokens else "on"


def concluding(path: StepPath) -> StepPath:
    """Return the path before a final answer, without an incomplete step."""
    return path.before() if path.state == "empty" else path


def path_result(
    path: StepPath,
    meter: TokenBudget,
    question: StrategyProblem,
    details: dict[str, Any],
    *,
    spent: bool,
) -> StrategyResult:
    """Return the result of a strategy that chose this path; `spent`: the budget ended it."""
    return StrategyResult(
        path.text, extract(path.text, question.form), meter.spent,
        "budget" if spent else path.finish_reason, path.token_ids,
        {"steps": path.plain(), **details},
    )  # fmt: skip
