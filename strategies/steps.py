"""Paths, step by step: candidates for the next step of several paths, in one batched call.

    Path  "step 1 . step 2 ."  --Ask(begun, until of the detector)-->  step 3a, 3b, 3c
      on      more steps may follow
      done    the end token, an answer, the response's last token, or the budget's
      empty   an answer pattern with nothing after it: the step is to be dropped, and a final answer
              sampled to the response's end (`concluded`); an end token is never taken for that

Text is what the sampler said, joined, and so are the ids; nothing is tokenised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from strategies.answers.extract import extract
from strategies.detectors import Detector
from strategies.problem import StrategyProblem
from strategies.result import StrategyResult
from strategies.samplers.sampler import PartialResponse, SampleResult
from strategies.samplers.token_budget import TokenBudget

State = Literal["on", "done", "empty"]


@dataclass(frozen=True)
class StepPath:
    """A response so far: its steps as they were said, and a score each where they were scored."""

    steps: tuple[SampleResult, ...] = ()
    scores: tuple[float, ...] = ()
    state: State = "on"

    @property
    def text(self) -> str:
        return "".join(s.text for s in self.steps)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of them, or none where those of a step are not told."""
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
        """With the last step's score."""
        return replace(self, scores=(*self.scores[: len(self.steps) - 1], score))

    def before(self) -> StepPath:
        """Without the last step."""
        kept = len(self.steps) - 1
        return StepPath(self.steps[:kept], self.scores[:kept])

    def plain(self) -> list[dict[str, Any]]:
        """JSON: each step with its tokens, and its score where it has one."""
        scores = [*self.scores, *[None] * (len(self.steps) - len(self.scores))]
        return [
            {"text": s.text, "tokens": s.tokens, "score": score}
            for s, score in zip(self.steps, scores, strict=True)
        ]


@dataclass(frozen=True)
class StepSampler:
    """Samples steps for one question."""

    meter: TokenBudget
    question: StrategyProblem
    detector: Detector
    top_logprobs: int = 0

    async def candidates(
        self, paths: Sequence[StepPath], count: int, name: str
    ) -> list[list[StepPath]]:
        """`count` ways to go on by one step, for each path: one call. Draws hang on `name`.

        Raises BudgetSpent.
        """
        return await self._sample(paths, count, name, whole=False)

    async def endings(
        self, paths: Sequence[StepPath], count: int, name: str
    ) -> list[list[StepPath]]:
        """`count` ways to end the response, for each path: one call. Raises BudgetSpent."""
        return await self._sample(paths, count, name, whole=True)

    async def _sample(
        self, paths: Sequence[StepPath], count: int, name: str, *, whole: bool
    ) -> list[list[StepPath]]:
        asks = []
        for p, path in enumerate(paths):
            text, left = path.text, self.question.sampling.max_tokens - path.tokens
            until = None if whole else self.detector.until(text, self.question.form)
            asks += [
                self.question.ask(
                    f"{name}/{p}/{c}",
                    begun=PartialResponse(text, path.token_ids),
                    until=until,
                    top_logprobs=self.top_logprobs,
                    most=min(left, self.detector.max_tokens) if until else left,
                )
                for c in range(count)
            ]
        said = await self.meter(asks)
        return [
            [self._longer(path, s, whole) for s in said[p * count : (p + 1) * count]]
            for p, path in enumerate(paths)
        ]

    def _longer(self, path: StepPath, said: SampleResult, whole: bool) -> StepPath:
        longer = StepPath((*path.steps, said), path.scores)
        return replace(longer, state="done" if whole else self._state(path, longer, said))

    def _state(self, path: StepPath, longer: StepPath, said: SampleResult) -> State:
        if said.finish_reason not in ("until", "length"):
            return "done"
        answered = self.detector.answered(path.text, said.text, self.question.form)
        if answered is not None:
            return "done" if answered else "empty"
        return "done" if longer.tokens >= self.question.sampling.max_tokens else "on"


def concluding(path: StepPath) -> StepPath:
    """Where a final answer goes on from: an incomplete step is dropped."""
    return path.before() if path.state == "empty" else path


def path_result(
    path: StepPath,
    meter: TokenBudget,
    question: StrategyProblem,
    details: dict[str, Any],
    *,
    spent: bool,
) -> StrategyResult:
    """The result of a strategy that chose this path; `spent`: because the budget is."""
    return StrategyResult(
        path.text, extract(path.text, question.form), meter.spent,
        "budget" if spent else path.finish_reason, path.token_ids,
        {"steps": path.plain(), **details},
    )  # fmt: skip
