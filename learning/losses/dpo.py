"""Compute replay_dpo: DPO on completions that external teachers preferred to the student's own.

    dpo                     m = (pi_c - ref_c) - (pi_r - ref_r)
    dpo_length_normalised   m = (pi_c - ref_c) / tokens_c - (pi_r - ref_r) / tokens_r

    loss = -log sigmoid(beta * m), the mean over pairs

`pi` and `ref` are log-probabilities of the chosen (c) and the rejected (r) completion under the
student and under the reference, summed over the completion's tokens only.

Source: Rafailov et al. 2023 (DPO); Meng et al. 2024 (why length matters).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from learning.losses.channel import LossChannel, LossTerm
from learning.packing import ChunkedLogits
from learning.scoring import response_logprobs
from protocols.errors import StaleTokenError
from protocols.spec.objective import DpoSpec, LossSpec, ObjectiveSpec
from protocols.train_batch import PreferencePair, TrainBatch, completions
from protocols.types import Sample

if TYPE_CHECKING:  # importing it takes seconds, which only code that loads a model should pay
    from transformers import PreTrainedModel

    from learning.losses.channel import Item, MicroBatch
    from learning.packing import ChunkedLogits


@dataclass(frozen=True)
class ReplayDPO(LossChannel):
    """Train on preference pairs, whose references may be at most `spec.max_reference_age` versions
    old."""

    weight: float
    spec: DpoSpec
    name: ClassVar[str] = "replay_dpo"
    reads: ClassVar[str] = "pairs"
    sampled: ClassVar[bool] = False

    @classmethod
    def of(cls, objective: ObjectiveSpec, loss: LossSpec) -> ReplayDPO:
        return cls(objective.beta, objective.dpo)

    def samples(self, batch: TrainBatch) -> list[tuple[Sample, ...]]:
        sides = completions(batch.pairs)
        return list(zip(sides[0::2], sides[1::2], strict=True))

    def items(self, batch: TrainBatch) -> list[Item]:
        return [
            (i, range(len(p.chosen_ids) + len(p.rejected_ids))) for i, p in enumerate(batch.pairs)
        ]

    def check(self, batch: TrainBatch, version: int) -> None:
        for p in batch.pairs:
            if is_stale(p, version, self.spec.max_reference_age):
                raise StaleTokenError(
                    f"preference pair {p.id} has a reference of version {p.ref_version}, and "
                    f"version {version} is being trained with objective.dpo.max_reference_age "
                    f"{self.spec.max_reference_age}: recompute it with "
                    "learning.losses.dpo.with_references; nothing was trained on it"
                )

    def denominator(self, batch: TrainBatch) -> int:
        return len(batch.pairs)

    def term(self, logits: ChunkedLogits, micro: MicroBatch) -> LossTerm:
        tokens = micro.tokens[self.name]
        pairs = [micro.batch.pairs[i] for i, _ in tokens.items]
        chosen, rejected = summed_by_pair(logits.logprobs(tokens.at, tokens.first), pairs)
        return replay_dpo(chosen, rejected, pairs, self.spec)


def replay_dpo(
    chosen: Tensor, rejected: Tensor, pairs: Sequence[PreferencePair], spec: DpoSpec
) -> LossTerm:
    """Return the summed loss of M pairs; chosen, rejected [M] are log-probabilities with gradient.
    The denominator is pairs. Facts are sums over pairs: the margin m, and how often it is > 0."""
    gain = chosen - chosen.new_tensor([p.ref_chosen for p in pairs])
    loss_of = rejected - rejected.new_tensor([p.ref_rejected for p in pairs])
    if spec.variant == "dpo_length_normalised":
        gain = gain / gain.new_tensor([len(p.chosen_ids) for p in pairs])
        loss_of = loss_of / loss_of.new_tensor([len(p.rejected_ids) for p in pairs])
    margin = gain - loss_of
    facts = {"margin": margin, "preferred": (margin > 0).float()}
    return LossTerm(
        total=-F.logsigmoid(spec.beta * margin).sum(),
        count=len(pairs),
        items=len(pairs),
        facts={name: values.detach().sum() for name, values in facts.items()},
    )


def summed_by_pair(logprobs: Tensor, pairs: Sequence[PreferencePair]) -> tuple[Tensor, Tensor]:
    """Return (chosen, rejected) [M] from token log-probabilities in the order of `completions`."""
    lengths = [n for p in pairs for n in (len(p.chosen_ids), len(p.rejected_ids))]
    if not lengths:
        return logprobs, logprobs
    sums = torch.stack([part.sum() for part in logprobs.split_with_sizes(lengths)])
    return sums[0::2], sums[1::2]


def is_stale(pair: PreferencePair, version: int, max_age: int | None) -> bool:
    """Return whether a pair's reference must be recomputed before training at `version`: it is
    older than the bound, or of a version that does not exist yet."""
    age = version - pair.ref_version
    return age < 0 or (max_age is not None and age > max_age)


def with_references(
    model: PreTrainedModel,
    pairs: Sequence[PreferencePair],
    prefixes: Mapping[str, Tensor],
    row_tokens: int,
    version: int,
    max_age: int | None,
) -> list[PreferencePair]:
    """Return the pairs in their order. A stale reference is computed anew under `version`, whose
    cartridges are `prefixes`."""
    stale = [p for p in pairs if is_stale(p, version, max_age)]
    if not stale:
        return list(pairs)
    logprobs = response_logprobs(model, completions(stale), prefixes, row_tokens)
    chosen, rejected = summed_by_pair(logprobs, stale)
    fresh = iter(
        [
            replace(p, ref_chosen=c, ref_rejected=r, ref_version=version)
            for p, c, r in zip(stale, chosen.tolist(), rejected.tolist(), strict=True)
        ]
    )
    return [next(fresh) if is_stale(p, version, max_age) else p for p in pairs]
