"""Records of a training run, and what a recipe is called with.

Prompt > Rollout > Lesson > StepRecord > MetricRow      one step
RunState                                                what a checkpoint keeps between two
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from protocols.episodes import Episode
from protocols.types import CacheStats, Completion, GenerateRequest, Sample, TrainStepOutput
from services.clients import Replied

ScoreGroup = Callable[[str, Sequence[Sample]], None]
"""Of a teacher's role: samples that are complete and are to be scored together, now."""


def unheard(role: str, samples: Sequence[Sample]) -> None:
    """A `ScoreGroup` where nobody scores beside the rollout."""


class TimedGenerate(Protocol):
    """Return completions in the order of the requests, and the seconds that any generator computed.

    `replied` is told of each reply's completions as soon as it is there.
    """

    def __call__(
        self, requests: Sequence[GenerateRequest], replied: Replied = None, /
    ) -> Awaitable[tuple[list[Completion], float]]: ...


@dataclass(frozen=True)
class StudyPrompt:
    """A self-study prompt ready to be sampled."""

    document: str
    kind: str
    request: GenerateRequest


@dataclass(frozen=True)
class Rollout:
    """What one step samples: samples with what was asked, and how long it took (seconds).

    `compute` is for how much of it any generator computed. Of `episodes`, the samples are the
    turns. `parts` are the ids of samples that the document teacher scores together, where that is
    not all: they are the same whenever it does so.
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
    """What the teachers' scores of one step cost.

    `compute_seconds` are the teachers' while the step waited for nothing else, `hidden_seconds`
    those beside the rollout. `documents` are the document teacher's look-ups, `moved_bytes` what
    the scores took over the tensor plane, put and got.
    """

    compute_seconds: float = 0.0
    hidden_seconds: float = 0.0
    documents: CacheStats = field(default_factory=CacheStats)
    moved_bytes: int = 0


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step. `orchestration` is what no model computed. `score` is the waiting: what
    the teachers did beside the rollout is not in it."""

    rollout: float
    score: float
    train: float
    publish: float
    orchestration: float
    step: float


@dataclass(frozen=True)
class StepRecord:
    """One finished training step, for the record."""

    rollout: Rollout
    output: TrainStepOutput
    times: StepTimes
    scoring: ScoringCost = field(default_factory=ScoringCost)


@dataclass
class RunState:
    """Where a run stands between two steps, all of it JSON: saved with every checkpoint.

    `step` steps of `arm` are done; `first_version` is the arm's version 0; `arms` the results so
    far; `tokens` trained by each arm; `pending` the rollouts that ran ahead; `course` what the
    course itself has under way; `warm` the doc_kl of every step on the teacher's text, and
    `warm_over` whether those steps are done.
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
        """The cartridge version that stands after the steps done."""
        return self.first_version + self.step
