"""Compute replay_dpo: learn from completions that external teachers preferred to the student's own.

`pi` and `ref` are log-probabilities of a completion under the student and under the reference,
summed over its own tokens; `n` is the number of these. Each variant has a value v of a completion,
a margin m = v(chosen) - v(rejected), and a loss of a pair:

    dpo_length_normalised   v = (pi - ref) / n   -log sigmoid(beta m)
    dpo                     v = pi - ref         -log sigmoid(beta m)
    ipo                     v = (pi - ref) / n   (m - 1 / (2 beta))^2
    simpo                   v = pi / n           -log sigmoid(beta m - gamma)
    kto                     v = pi - ref         half of desirable * (1 - sigmoid(beta (v_c - z)))
                                                 + undesirable * (1 - sigmoid(beta (z - v_r)))
    regression              v = (pi - ref) / n   the mean of (sigmoid(beta v) - share of votes)^2
                                                 over the two completions

kto's reference point z is the mean of v over all completions of a cartridge in the step, at least
0, without gradient: it stands for the KL to the reference, for which its authors score mismatched
pairs. All pairs of a cartridge are therefore in one micro-batch. ipo takes means over tokens, as
TRL does on its authors' advice. regression reads a completion's score as a process reward: the
share of the teachers' votes.

With `smoothing: votes` the two completions count as exchanged with the probability
eps = (1 - share of the votes for the chosen) / 2, in every variant but regression:

    (1 - eps) * loss(chosen, rejected) + eps * loss(rejected, chosen)

The reference is the untrained cartridge, or that of the version which first trains the pair
(`reference: first_use`). The latter follows the student, and holds it nowhere.

`nll` adds nll * (-pi / n) of the chosen. All losses are means over pairs.

Sources: Rafailov et al. 2023 (DPO); Azar et al. 2023 (IPO); Meng et al. 2024 (SimPO); Ethayarajh et
al. 2024 (KTO); Mitchell 2023 (conservative DPO: smoothing); Pang et al. 2024 (RPO: nll).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from cartridge_forge.learning.batch import ChunkedLogits, Item, MicroBatch
from cartridge_forge.learning.losses.channel import LossChannel, LossTerm, counted
from cartridge_forge.plugins.objectives.policy_scores import is_stale, summed_by_pair
from cartridge_forge.plugins.replay.spec import DpoSpec, ReplayObjective
from cartridge_forge.protocols.errors import StaleTokenError
from cartridge_forge.protocols.spec.sections import LossSpec, ObjectiveSpec
from cartridge_forge.protocols.step import PreferencePair, Sample, TrainBatch, completions


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
    def from_spec(cls, objective: ObjectiveSpec, loss: LossSpec) -> ReplayDPO:
        ours = ReplayObjective.of(objective)
        return cls(ours.beta, ours.dpo)

    def samples(self, batch: TrainBatch) -> list[tuple[Sample, ...]]:
        return [tuple(completions(pairs)) for pairs in self._groups(batch)]

    def items(self, batch: TrainBatch) -> list[Item]:
        return [
            (i, range(sum(len(p.chosen_ids) + len(p.rejected_ids) for p in pairs)))
            for i, pairs in enumerate(self._groups(batch))
        ]

    def check(self, batch: TrainBatch, version: int) -> None:
        for p in batch.pairs if self.spec.has_reference else ():
            if is_stale(p, version, self.spec.max_reference_age):
                raise StaleTokenError(
                    f"preference pair {p.id} has a reference of version {p.ref_version}, and "
                    f"version {version} is being trained with objective.dpo.max_reference_age "
                    f"{self.spec.max_reference_age}: recompute it with "
                    "learning.losses.dpo.with_references; nothing was trained on it"
                )

    def denominators(self, batch: TrainBatch) -> dict[str, int]:
        return counted((pair.cartridge, 1) for pair in batch.pairs)

    def term(self, logits: ChunkedLogits, micro: MicroBatch) -> LossTerm:
        tokens = micro.tokens[self.name]
        groups = self._groups(micro.batch)
        pairs = [p for i, _ in tokens.items for p in groups[i]]
        chosen, rejected = summed_by_pair(logits.logprobs(tokens.at, tokens.first), pairs)
        return replay_dpo(chosen, rejected, pairs, self.spec)

    def _groups(self, batch: TrainBatch) -> list[Sequence[PreferencePair]]:
        """Return the pairs in groups that no micro-batch divides: of kto all pairs of a
        cartridge."""
        if self.spec.variant != "kto":
            return [(pair,) for pair in batch.pairs]
        groups: dict[str, list[PreferencePair]] = {}
        for pair in batch.pairs:
            groups.setdefault(pair.cartridge, []).append(pair)
        return list(groups.values())


def replay_dpo(
    chosen: Tensor, rejected: Tensor, pairs: Sequence[PreferencePair], spec: DpoSpec
) -> LossTerm:
    """Return the summed loss of M pairs; chosen, rejected [M] are log-probabilities with gradient.
    The denominator is pairs. Facts are sums over pairs: the margin m, how often it is > 0, with
    `nll` that of the chosen, nats a token, and of kto the reference point."""
    lengths = [chosen.new_tensor([len(p.chosen_ids) for p in pairs])]
    lengths.append(chosen.new_tensor([len(p.rejected_ids) for p in pairs]))
    better, worse = chosen, rejected
    if spec.has_reference:
        better = chosen - chosen.new_tensor([p.ref_chosen for p in pairs])
        worse = rejected - rejected.new_tensor([p.ref_rejected for p in pairs])
    if spec.variant not in ("dpo", "kto"):
        better, worse = better / lengths[0], worse / lengths[1]
    margin = better - worse
    facts = {"margin": margin, "preferred": (margin > 0).float()}
    shares = [chosen.new_tensor([p.chosen_share for p in pairs])]
    shares.append(chosen.new_tensor([p.rejected_share for p in pairs]))
    if spec.variant == "regression":
        losses = _regression(better, worse, shares, spec.sharpness)
    else:
        point = _reference_points(better, worse, [p.cartridge for p in pairs])
        losses = _preference(better, worse, point, spec)
        if spec.smoothing == "votes":
            swapped = (1 - shares[0]) / 2
            losses = (1 - swapped) * losses + swapped * _preference(worse, better, point, spec)
        if spec.variant == "kto":
            facts["reference_point"] = point
    if spec.nll:
        facts["nll"] = -chosen / lengths[0]
        losses = losses + spec.nll * facts["nll"]
    return LossTerm(
        losses=losses,
        owners=[(p.cartridge, 1) for p in pairs],
        count=len(pairs),
        items=len(pairs),
        facts={name: values.detach().sum() for name, values in facts.items()},
    )


def _preference(better: Tensor, worse: Tensor, point: Tensor, spec: DpoSpec) -> Tensor:
    """Return the loss [M] of pairs whose completions have the values `better`, `worse` [M]."""
    beta, margin = spec.sharpness, better - worse
    if spec.variant == "ipo":
        return (margin - 1 / (2 * beta)) ** 2
    if spec.variant == "kto":
        # 1 - sigmoid(x) is sigmoid(-x)
        gained = spec.desirable * torch.sigmoid(beta * (point - better))
        lost = spec.undesirable * torch.sigmoid(beta * (worse - point))
        return (gained + lost) / 2
    target = spec.gamma if spec.variant == "simpo" else 0.0
    return -F.logsigmoid(beta * margin - target)


def _regression(better: Tensor, worse: Tensor, shares: Sequence[Tensor], beta: float) -> Tensor:
    """Return the loss [M] of scores in (0, 1) against shares of votes (chosen, rejected) [M]."""
    errors = [torch.sigmoid(beta * v) - s for v, s in zip((better, worse), shares, strict=True)]
    return (errors[0] ** 2 + errors[1] ** 2) / 2


def _reference_points(better: Tensor, worse: Tensor, cartridges: Sequence[str]) -> Tensor:
    """Return kto's reference point [M] of each pair, that of its cartridge, without gradient."""
    points = torch.zeros_like(better)
    for name in set(cartridges):
        indices = [i for i, cartridge in enumerate(cartridges) if cartridge == name]
        values = torch.cat([better[indices], worse[indices]]).detach()
        points[indices] = values.mean().clamp(min=0)
    return points
