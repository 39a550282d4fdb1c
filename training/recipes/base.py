"""What a run studies: a step's rollout, what is learned of it, and how arms are measured.

SelfStudy       one answer to each prompt about a document     (training.recipes.longhealth)
Cases           episodes of several turns with a desk's tools  (training.recipes.tool_episodes)
RsaCourse       runs of recursive self-aggregation             (training.recipes.rsa)
DocumentCourse  answers about a user's own documents           (training.recipes.documents)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from protocols.records.run_files import MeasuredAccuracy
from protocols.train_batch import TrainBatch
from services.run_directory import RunDirectory
from training.types import Rollout, ScoreGroup, StepRecord, TimedGenerate, unheard


class Recipe(Protocol):
    """`documents` maps each name to its token ids from position 0; `end_ids` end a response.

    A course inherits what it has no need of: nothing is prepared, saved or told.
    """

    documents: Mapping[str, tuple[int, ...]]
    end_ids: frozenset[int]

    def prepare(self, step: int) -> None:
        """Make what `step` will ask beforehand, while the models work."""
        return

    @abstractmethod
    async def sample(
        self, step: int, version: int, generate: TimedGenerate, ended: ScoreGroup = unheard
    ) -> Rollout:
        """The on-policy rollout of 0-based `step`, over cartridge `version`. What of its lesson is
        complete before the rollout is told to `ended`, in parts that hang on the requests and on
        what was said alone, never on who was faster."""

    @abstractmethod
    async def lesson(self, rollout: Rollout, version: int) -> TrainBatch:
        """What `version` learns of a rollout, still without the teachers' scores."""

    @abstractmethod
    async def offline(self, first: int, generate: TimedGenerate) -> list[Rollout]:
        """What the document teacher itself writes for the next few steps, from `first`."""

    @abstractmethod
    async def measure(
        self, arm: str, prefix: str, version: int, *, most: int | None, sampled: bool,
        generate: TimedGenerate,
    ) -> MeasuredAccuracy:  # fmt: skip
        """One arm on the first `most` held-out questions (None: all), greedily or by sampling;
        prefix "cartridge", "document" or "none"."""

    @abstractmethod
    def record(self, rollout: Rollout, arm: str, step: int, directory: RunDirectory) -> None:
        """Write a trained rollout down."""

    def facts(self, record: StepRecord) -> Mapping[str, Any]:
        """What the step's row of metrics.jsonl has beside the usual."""
        return {}

    def heard(self, directory: RunDirectory) -> Mapping[str, Any]:
        """What the step's event has beside the usual: what a clock decides, and no seed."""
        return {}

    def saved(self) -> dict[str, Any]:
        """What is under way, as JSON, for a checkpoint."""
        return {}

    def stand(self, saved: Mapping[str, Any]) -> None:
        """Take up what a checkpoint's `saved` had under way."""
        return

    async def close(self) -> None:
        """Give up what is under way."""
        return
