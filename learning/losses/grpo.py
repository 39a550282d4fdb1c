"""grpo: the policy gradient of rewarded episodes, clipped, over any of the field's denominators.

Per trained token t, with `pi` the student's log-probability of the token, `old` the trainer's under
the version that sampled it, `sampler` the inference engine's own, `ref` a frozen reference's:

    r_t    = exp(pi - old); "sequence": exp of the mean over the episode's tokens, one for each
    loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
             for A_t < 0 at most -dual_clip * A_t
    w_t    = exp(old - sampler), no gradient: the sampler is not quite the trainer's model
    k3_t   = exp(d) - d - 1,  d = ref - pi

    sum over t of  w_t * loss_t + kl * k3_t,  divided by

    grpo       each token by its episode's length, then by episodes
    dr_grpo    episodes * max_length
    bnpo       tokens of this trainer's batch
    dapo       tokens of all trainers' batches

A trainer's batch is all its micro-batches on all its ranks; where there is one trainer, bnpo and
dapo are equal.
With one update for each rollout, `old` is `pi` without its gradient: the ratio is 1, its gradient
is not.

Sources: Shao et al. 2024 (GRPO); Yu et al. 2025 (DAPO: clip-higher, token mean); Liu et al. 2025
(Dr. GRPO); Zheng et al. 2025 (sequence ratio); Ye et al. 2020 (dual clip); Schulman 2020 (k3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from learning.losses.advantages import BASELINES
from learning.losses.terms import Term
from protocols.errors import SpecError

REDUCTIONS = ("grpo", "bnpo", "dr_grpo", "dapo")
LOG_RATIO_BOUND = 20.0  # exp(20) is 5e8: beyond it a ratio says "wrong", not "how much"


@dataclass(frozen=True)
class Mismatch:
    """What to do where sampler and trainer disagree on a token's probability.

    level    "token": each token's own weight; "sequence": their product over the episode
    mode     "truncate": at most `high`; "mask": nothing above `high`; "band": nothing outside
             [low, high]
    """

    level: str = "token"
    mode: str = "truncate"
    high: float = 2.0
    low: float = 0.5

    def __post_init__(self) -> None:
        if self.level not in ("token", "sequence") or self.mode not in ("truncate", "mask", "band"):
            raise SpecError(
                "mismatch.level must be token or sequence and mismatch.mode truncate, mask or "
                f"band: got {self.level!r}, {self.mode!r}"
            )
        if not 0 < self.low <= 1 <= self.high:
            raise SpecError(
                "mismatch needs 0 < low <= 1 <= high, or tokens on which sampler and trainer agree "
                f"would be touched: got low {self.low}, high {self.high}"
            )


@dataclass(frozen=True)
class GRPO:
    """Which policy gradient. `max_length` (tokens) is read by dr_grpo alone; `kl` weighs k3;
    `distill` is the price of a nat between student and teacher in the advantage."""

    baseline: str = "grpo"
    ratio: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    kl: float = 0.0
    reduction: str = "dapo"
    max_length: int | None = None
    mismatch: Mismatch | None = field(default_factory=Mismatch)
    distill: float = 0.0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("baseline", BASELINES), ("ratio", ("token", "sequence")), ("reduction", REDUCTIONS)
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise SpecError(
                    f"grpo.{name} must be one of {allowed}: got {getattr(self, name)!r}"
                )
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise SpecError(
                "grpo.clip_low must be in [0, 1] and clip_high >= 0: got "
                f"{self.clip_low}, {self.clip_high}"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise SpecError(
                f"grpo.dual_clip must be > 1: got {self.dual_clip}; 3 is the usual choice"
            )
        if (self.reduction == "dr_grpo") != (self.max_length is not None):
            raise SpecError(
                "grpo.max_length belongs to grpo.reduction dr_grpo, which divides by it: got "
                f"{self.max_length} with {self.reduction}; set it to rollout.max_tokens, or "
                "remove it"
            )
        if self.kl < 0 or self.distill < 0:
            raise SpecError(f"grpo.kl and grpo.distill must be >= 0: got {self.kl}, {self.distill}")


def grpo(
    pi: Tensor,
    old: Tensor,
    advantages: Tensor,
    lengths: Sequence[int],
    spec: GRPO,
    *,
    sampler: Tensor | None = None,
    ref: Tensor | None = None,
) -> Term:
    """The summed loss of B episodes of `lengths` trained tokens, laid end to end: all are [N].

    `pi` has gradient, `old`, `sampler` and `ref` none. `sampler` is needed for a mismatch
    correction and `ref` for kl > 0. Facts are sums over tokens: clipped, ratio, k3, the mismatch
    weight and the share that it corrected.
    """
    log_ratio = pi - old
    if spec.ratio == "sequence":
        log_ratio = per_episode(log_ratio, lengths, torch.mean)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    gain, bounded_gain = ratio * advantages, bounded * advantages
    loss = -torch.minimum(gain, bounded_gain)
    if spec.dual_clip is not None:
        worst = -spec.dual_clip * advantages
        loss = torch.where(advantages < 0, torch.minimum(loss, worst), loss)
    facts = {"ratio": ratio, "clipped": (bounded_gain < gain).float()}
    if spec.mismatch is not None:
        assert sampler is not None, "a mismatch correction needs the sampler's log-probabilities"
        weight, corrected = mismatch_weight(old, sampler, lengths, spec.mismatch)
        loss = weight * loss
        facts |= {"mismatch_weight": weight, "mismatch_corrected": corrected}
    if spec.kl > 0:
        assert ref is not None, "a KL to the reference needs its log-probabilities"
        k3 = k3_divergence(pi, ref)
        loss = loss + spec.kl * k3
        facts["k3"] = k3
    if spec.reduction == "grpo":
        counts = torch.tensor(list(lengths), dtype=torch.long)
        loss = loss / counts.repeat_interleave(counts).to(loss)
    return Term(
        total=loss.sum(),
        count=grpo_count(lengths, spec),
        items=len(pi),
        facts={name: values.detach().sum() for name, values in facts.items()},
    )


def grpo_count(lengths: Sequence[int], spec: GRPO) -> int:
    """The denominator, known before the student has been asked; adds up over micro-batches."""
    if spec.reduction == "grpo":
        return len(lengths)
    if spec.reduction == "dr_grpo":
        assert spec.max_length is not None
        return len(lengths) * spec.max_length
    return sum(lengths)


def k3_divergence(pi: Tensor, ref: Tensor) -> Tensor:
    """Per token exp(d) - d - 1 with d = ref - pi: never negative, and unbiased for KL(pi || ref)
    under pi's own samples."""
    d = ref - pi
    return d.exp() - d - 1


def mismatch_weight(
    old: Tensor, sampler: Tensor, lengths: Sequence[int], spec: Mismatch
) -> tuple[Tensor, Tensor]:
    """(weight, 1.0 where it was truncated or masked), [N] each, without gradient."""
    log_weight = (old - sampler).detach()
    if spec.level == "sequence":
        log_weight = per_episode(log_weight, lengths, torch.sum)
    weight = log_weight.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    out = weight > spec.high
    if spec.mode == "truncate":
        return weight.clamp(max=spec.high), out.float()
    if spec.mode == "band":
        out = out | (weight < spec.low)
    return weight.masked_fill(out, 0.0), out.float()


def distilled(advantages: Tensor, student: Tensor, teacher: Tensor, price: float) -> Tensor:
    """On-policy distillation as a reward: A - price * (student - teacher), [N], no gradient.

    `student` and `teacher` are log-probabilities of the sampled tokens: their difference is the
    reverse KL's one-sample estimate.
    """
    return advantages - price * (student - teacher).detach()


def per_episode(
    values: Tensor, lengths: Sequence[int], reduce: Callable[[Tensor], Tensor]
) -> Tensor:
    """`reduce` over each episode's tokens, given to every one of them: [N] to [N]."""
    if not lengths:
        return values
    parts = values.split_with_sizes(list(lengths))
    return torch.cat([reduce(part).expand(len(part)) for part in parts])
