"""Hold a teacher's distribution over given tokens: all logits, or its top k log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from protocols.train_batch import PrecomputedScores


@dataclass(frozen=True)
class TeacherDistribution:
    """Hold the teacher's distribution at N response tokens: `logits` [N, V], or its top k
    (`indices`, `logprobs` [N, k], log-probabilities under the whole vocabulary)."""

    logits: Tensor | None = None
    indices: Tensor | None = None
    logprobs: Tensor | None = None

    @property
    def tokens(self) -> int:
        one = self.logits if self.logits is not None else self.logprobs
        assert one is not None
        return len(one)

    def rows(self, which: slice | Tensor) -> TeacherDistribution:
        """Return the distribution at some of the tokens: a slice, or indices [n]."""
        return self._each(lambda x: x[which])

    def to(self, device: torch.device) -> TeacherDistribution:
        """Return a copy on the student's device. Scores arrive from the tensor plane on the host
        and are moved to the device a chunk of tokens at a time."""
        return self._each(lambda x: x.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> TeacherDistribution:
        held = (self.logits, self.indices, self.logprobs)
        return TeacherDistribution(*(None if x is None else change(x) for x in held))


def of_stored(stored: PrecomputedScores) -> TeacherDistribution:
    """Return the distribution that was stored when a sample's text was written."""
    indices = torch.tensor(stored.ids, dtype=torch.int32)
    return TeacherDistribution(indices=indices, logprobs=torch.tensor(stored.logprobs))


def joined(
    parts: Sequence[tuple[Sequence[int], TeacherDistribution]], lengths: Sequence[int]
) -> TeacherDistribution:
    """Return one distribution over all samples' tokens, in sample order, from parts over some of
    them. `lengths[i]` is the number of tokens of sample i. A part is the indices of its samples, in
    the order of its teacher's rows: ((0, 2), T1), ((1,), T2)."""
    if len(parts) == 1 and tuple(parts[0][0]) == tuple(range(len(lengths))):
        return parts[0][1]
    order = [i for samples, _ in parts for i in samples]
    assert sorted(order) == list(range(len(lengths))), "a sample is scored once"
    begins = dict(zip(order, accumulate((lengths[i] for i in order), initial=0), strict=False))
    rows = torch.tensor(
        [begins[i] + t for i, length in enumerate(lengths) for t in range(length)], dtype=torch.long
    )
    columns = zip(*((t.logits, t.indices, t.logprobs) for _, t in parts), strict=True)
    return TeacherDistribution(
        *(None if x[0] is None else torch.cat(x)[rows.to(x[0].device)] for x in columns)
    )


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k most likely tokens and their log-probabilities: ([N, k] int32, [N, k]
    float32)."""
    found = F.log_softmax(logits.float(), dim=-1).topk(min(k, logits.shape[-1]), dim=-1)
    return found.indices.int(), found.values
