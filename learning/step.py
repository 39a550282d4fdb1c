"""The training step, top to bottom: one optimiser update of the cartridges on given samples.

    samples (who sampled them: the caller's business, checked here by version)
      -> pack over shared prefixes
      -> student forward: the only forward with gradient
      -> teacher's distribution over the same tokens (given)
      -> doc_kl over its own denominator
      -> backward into the cartridges alone -> clip -> Adam

What is *not* here: no second student forward for "old" log-probabilities (one update for each
rollout needs none), no gradient of the base model, no value function, no reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from learning.batching import pack, response_logits
from learning.cartridge import CartridgeBank
from learning.losses import DocKL, Teacher, doc_kl
from protocols.errors import RunError, StaleTokenError
from protocols.types import Sample

OFFLINE_VERSION = -1  # the version of tokens that a document teacher wrote


@dataclass(frozen=True)
class Schedule:
    """Learning rate over `steps`: linear warm-up, then cosine down to a tenth of the peak."""

    lr: float
    warmup_steps: int
    steps: int

    def at(self, step: int) -> float:
        """The rate of 0-based `step`."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        rest = max(1, self.steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / rest)
        return self.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True)
class StepResult:
    """Means over the step's trained tokens; `grad_norm` is before clipping."""

    kl: float
    grad_norm: float
    lr: float
    tokens: int
    stale_tokens: int


def new_optimizer(bank: CartridgeBank) -> torch.optim.Adam:
    """Adam over the trainable cartridge tokens alone, no weight decay."""
    return torch.optim.Adam([bank.trainable], lr=0.0)


def check_fresh(samples: Sequence[Sample], version: int, staleness: int) -> int:
    """Count tokens sampled by a version older than `version`; refuse any older than the bound.

    Raises StaleTokenError. Tokens written by the document teacher have no version to be stale.
    """
    stale = 0
    for s in samples:
        if len(s.versions) != len(s.response_ids):
            raise StaleTokenError(
                f"sample {s.id} has {len(s.response_ids)} tokens and {len(s.versions)} versions: "
                "its tokens cannot be proven fresh"
            )
        for v in s.versions:
            if v == OFFLINE_VERSION:
                continue
            if not version - staleness <= v <= version:
                raise StaleTokenError(
                    f"sample {s.id} was sampled by version {v}, and version {version} is being "
                    f"trained with train.staleness {staleness}: a publish did not reach the "
                    "generator that sampled it; nothing was trained on it"
                )
            stale += v < version
    return stale


def train_step(
    model: PreTrainedModel,
    bank: CartridgeBank,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    teacher: Teacher,
    *,
    loss: DocKL,
    lr: float,
    clip: float,
    row_tokens: int,
    version: int,
    staleness: int,
) -> StepResult:
    """One update. Raises StaleTokenError (nothing trained) or RunError for a non-finite loss."""
    stale = check_fresh(samples, version, staleness)

    prefix_tokens = {name: bank.frozen.shape[4] + bank.trainable.shape[4] for name in bank.names}
    packed = pack(samples, prefix_tokens, row_tokens)

    kv = bank.kv(packed.names).to(model.dtype)
    logits = response_logits(model, packed, kv)

    total, count = doc_kl(logits, teacher, loss)
    mean = total / max(count, 1)
    if not torch.isfinite(mean):
        raise RunError(
            f"doc_kl became {mean.item()} at version {version}; lower train.lr (now {lr:g})"
        )

    optimizer.zero_grad(set_to_none=True)
    mean.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    norm = torch.nn.utils.clip_grad_norm_([bank.trainable], clip)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return StepResult(
        kl=mean.item(),
        grad_norm=norm.item(),
        lr=lr,
        tokens=len(packed.targets),
        stale_tokens=stale,
    )
