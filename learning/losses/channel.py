"""Define the interface of a loss channel: the samples it reads, its loss term and its denominator.

A new channel is a file in this folder with a class of this interface, a section of
`protocols.spec.objective.ObjectiveSpec`, and an entry in `learning.losses.objective.CHANNELS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from learning.teacher_logprobs import TeacherDistribution
from protocols.errors import DataError

if TYPE_CHECKING:
    from learning.losses.terms import LossTerm
    from learning.micro_batch import Item, MicroBatch
    from learning.model.chunked_logits import ChunkedLogits
    from protocols.spec.objective import LossSpec, ObjectiveSpec
    from protocols.train_batch import TrainBatch
    from protocols.types import Sample


class LossChannel(Protocol):
    """Define one term of the objective, weight * total / denominator.

    name     the channel's key in CHANNELS, and in metrics
    reads    the set of samples that it reads; channels that name the same set share its logits
    sampled  whether these samples carry the versions that sampled them: stale ones are refused
    weight   a channel of weight 0 is left out of the step
    """

    name: ClassVar[str]
    reads: ClassVar[str]
    sampled: ClassVar[bool] = True
    weight: float

    @classmethod
    def of(cls, objective: ObjectiveSpec, loss: LossSpec, step: int) -> Self:
        """Return the channel for 0-based `step`."""
        ...

    def samples(self, batch: TrainBatch) -> Sequence[tuple[Sample, ...]]:
        """Return the whole set `reads`, in groups that no micro-batch divides."""
        ...

    def items(self, batch: TrainBatch) -> Sequence[Item]:
        """Return the groups of `samples` that bear the loss, with their tokens. A group that is an
        item of no channel is not read."""
        ...

    def check(self, batch: TrainBatch, version: int) -> None:
        """Raise DataError for data that does not match, StaleTokenError for data that `version`
        cannot be trained on."""
        ...

    def denominator(self, batch: TrainBatch) -> int:
        """Return the divisor of the total over the whole batch; 0 without data."""
        ...

    def facts(self, batch: TrainBatch) -> Mapping[str, float]:
        """Return further metrics of the whole batch."""
        return {}

    def term(self, logits: ChunkedLogits, micro: MicroBatch) -> LossTerm:
        """Return the term over the channel's items in one micro-batch, which has at least one."""
        ...


def check_scores(batch: TrainBatch, name: str, tokens: int, *, needed: bool) -> None:
    """Raise DataError unless `batch.scores[name]` covers `tokens` tokens, or is absent and not
    needed."""
    given = batch.scores.get(name)
    if given is None:
        if needed and tokens:
            raise DataError(
                f"the batch has no {name}, which this objective needs; score its samples with "
                "learning.scoring, or set the weight that asks for it to 0"
            )
        return
    held = given.tokens if isinstance(given, TeacherDistribution) else len(given)
    if held != tokens:
        raise DataError(
            f"the batch's {name} speaks of {held} tokens and its samples have {tokens}; give one "
            "entry for each response token, those not trained on included (of a hinted turn: for "
            "each of its tokens)"
        )
