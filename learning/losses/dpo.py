"""replay_dpo: completions that external teachers preferred, against those the student wrote.

    dpo                     m = (pi_c - ref_c) - (pi_r - ref_r)
    dpo_length_normalised   m = (pi_c - ref_c) / tokens_c - (pi_r - ref_r) / tokens_r

    loss = -log sigmoid(beta * m), the mean over pairs

with `pi` and `ref` the log-probabilities of the chosen and the rejected completion, summed over the
completion's tokens alone, under the student and under the reference.

Source: Rafailov et al. 2023 (DPO); Meng et al. 2024 (why length matters).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from learning.losses.terms import Term
from protocols.channels import PreferencePair
from protocols.errors import SpecError

VARIANTS = ("dpo", "dpo_length_normalised")


@dataclass(frozen=True)
class DPO:
    """Which preference loss. A reference older than `max_reference_age` versions is stale; None
    lets one of any age stand, as for a reference that is the untrained cartridge."""

    variant: str = "dpo"
    beta: float = 0.1
    max_reference_age: int | None = None

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise SpecError(f"replay.variant must be one of {VARIANTS}: got {self.variant!r}")
        if self.beta <= 0 or (self.max_reference_age or 0) < 0:
            raise SpecError(
                "replay.beta must be > 0 and replay.max_reference_age >= 0: got "
                f"{self.beta}, {self.max_reference_age}"
            )


def replay_dpo(
    chosen: Tensor, rejected: Tensor, pairs: Sequence[PreferencePair], spec: DPO
) -> Term:
    """The summed loss of M pairs; chosen, rejected [M] log-probabilities with gradient.

    The denominator is pairs. Facts are sums over pairs: margin m, and how often it is > 0.
    """
    gain = chosen - chosen.new_tensor([p.ref_chosen for p in pairs])
    loss_of = rejected - rejected.new_tensor([p.ref_rejected for p in pairs])
    if spec.variant == "dpo_length_normalised":
        gain = gain / gain.new_tensor([len(p.chosen_ids) for p in pairs])
        loss_of = loss_of / loss_of.new_tensor([len(p.rejected_ids) for p in pairs])
    margin = gain - loss_of
    facts = {"margin": margin, "preferred": (margin > 0).float()}
    return Term(
        total=-F.logsigmoid(spec.beta * margin).sum(),
        count=len(pairs),
        items=len(pairs),
        facts={name: values.detach().sum() for name, values in facts.items()},
    )


def summed_by_pair(logprobs: Tensor, pairs: Sequence[PreferencePair]) -> tuple[Tensor, Tensor]:
    """(chosen, rejected) [M] from token log-probabilities in the order of `completions`."""
    lengths = [n for p in pairs for n in (len(p.chosen_ids), len(p.rejected_ids))]
    if not lengths:
        return logprobs, logprobs
    sums = torch.stack([part.sum() for part in logprobs.split_with_sizes(lengths)])
    return sums[0::2], sums[1::2]


def is_stale(pair: PreferencePair, version: int, max_age: int | None) -> bool:
    """Whether a pair's reference must be recomputed before it is trained on at `version`: it is
    older than the bound, or of a version that does not exist yet."""
    age = version - pair.ref_version
    return age < 0 or (max_age is not None and age > max_age)
