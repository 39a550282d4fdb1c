"""Define the records of a training run and the call interface of recipes.

StudyPrompt > Rollout > TrainBatch > StepRecord > MetricRow    one step
RunState                                                       saved between two steps
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from protocols.episodes import Episode
from protocols.types import CacheStats, Completion, GenerateRequest, Sample, TrainStepOutput
from services.clients import Replied

ScoreGroup = Callable[[str, Sequence[Sample]], None]
"""Called with a teacher's role and completed samples, which it scores together, now."""


def unheard(role: str, samples: Sequence[Sample]) -> None:
    """Ignore the samples: the `ScoreGroup` of callers that do not score beside the rollout."""


class TimedGenerate(Protocol):
    """Return completions in the order of the requests, and the seconds that any generator computed.
    `replied` is called with the completions of each reply when it arrives."""

    def __call__(
        self, requests: Sequence[GenerateRequest], replied: Replied = None, /
    ) -> Awaitable[tuple[list[Completion], float]]: ...


@dataclass(frozen=True)
class StudyPrompt:
    """Hold a self-study prompt ready to be sampled."""

    document: str
    kind: str
    request: GenerateRequest


@dataclass(frozen=True)
class Rollout:
    """Hold what one step samples: samples with their prompts and completions.

    `seconds` is the wall time, `compute` the part of it in which any generator computed. With
    `episodes`, the samples are their turns. `parts` are groups of sample ids that the document
    teacher scores together, where that is not all of them at once.
    """

    step: int
    prompts: Sequence[StudyPrompt]
    completions: Sequence[Completion]
    samples: Sequence[Sample]
    seconds: float
    compute: float
    episodes: Sequence[Episode] = ()
    parts: Sequence[tuple[str, ...]] = ()


@dataclass(frozen=True)
class ScoringCost:
    """Hold the cost of one step's teacher scores.

    `compute_seconds` is teacher time that the step waited for, `hidden_seconds` teacher time beside
    the rollout. `documents` counts the document teacher's cache look-ups; `moved_bytes` is what the
    scores moved over the tensor plane, puts and gets together.
    """

    compute_seconds: float = 0.0
    hidden_seconds: float = 0.0
    documents: CacheStats = field(default_factory=CacheStats)
    moved_bytes: int = 0


@dataclass(frozen=True)
class StepTimes:
    """Hold the seconds of one step. `orchestration` is time in which no model computes. `score` is
    only the time waited, without what the teachers did beside the rollout."""

    rollout: float
    score: float
    train: float
    publish: float
    orchestration: float
    step: float


@dataclass(frozen=True)
class StepRecord:
    """Hold one finished training step."""

    rollout: Rollout
    output: TrainStepOutput
    times: StepTimes
    scoring: ScoringCost = field(default_factory=ScoringCost)


@dataclass
class RunState:
    """Hold the position of a run between two steps, all of it JSON: saved with every checkpoint.

    `step` steps of `arm` are done; `first_version` is the arm's version 0; `arms` holds the results
    so far, `tokens` the tokens trained by each arm, `pending` the rollouts that ran ahead. `course`
    is the recipe's own state, `warm` the doc_kl of every warm-start step. `warm_over` is true once
    the warm start has ended.
    """

    arm: str = "on_policy"
    step: int = 0
    first_version: int = 0
    arms: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    rollouts: int = 0
    stale_tokens: int = 0
    kl_first: float | None = None
    kl_last: float | None = None
    pending: list[dict[str, Any]] = field(default_factory=list)
    course: dict[str, Any] = field(default_factory=dict)
    warm: list[float] = field(default_factory=list)
    warm_over: bool = False

    @property
    def version(self) -> int:
        """Return the cartridge version after the steps done."""
        return self.first_version + self.step
