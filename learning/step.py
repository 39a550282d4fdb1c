"""Run one training step: one optimizer update of the cartridges on a given batch.

    batch (its caller sampled it; its versions are checked here)
      -> channels of weight 0 left out; advantages; each channel's own denominator
      -> this rank's micro-batches, each packed over shared prefixes: samples of all channels
         together, and a text that several channels train on once
      -> student forward: the only forward with gradient
      -> given teacher distributions over the same tokens, against the student's logits, which
         exist for a chunk of tokens at a time
      -> the sampler's log-probabilities compared with those of these logits: a step of tokens that
         this version did not sample is refused before the update
      -> one named term for each channel over its own denominator, times its weight
      -> backward into the cartridges only: one of the sum, or one for each channel where the
         channels are balanced (`learning.losses.balance`)
      -> sums over all ranks -> clip -> Adam

Advantages and denominators are those of the whole batch, which every rank receives, so neither
ranks nor micro-batches change a term.

A rollout that is trained in several updates runs this for each (`learning.updates`), with the
log-probabilities before the first as scores (`learning.policy_scores`).

Left out on purpose: a gradient of the base model, and a value function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from learning.batch import prepare
from learning.cartridge.bank import CartridgeBank
from learning.cartridge.composition import (
    prefix_lengths,
    prefix_name,
    student_prefixes,
)
from learning.losses.balance import GradientBalance
from learning.losses.channel import LossAccumulator, LossChannel
from learning.model.decoder import LanguageModel
from learning.model.distributed import ALONE, ProcessGroup, is_sharded
from learning.packing import check_rows, pack, response_tokens
from learning.sampler_gap import GapBounds, SamplerGap
from protocols.errors import RunError, StaleTokenError
from protocols.train_batch import TrainBatch
from protocols.types import Sample, TrainStepOutput

OFFLINE_VERSION = -1  # the version of tokens that a document teacher wrote


@dataclass(frozen=True)
class LearningRateSchedule:
    """Compute the learning rate over `steps`: linear warm-up, then cosine down to a tenth of the
    peak."""

    lr: float
    warmup_steps: int
    steps: int

    def at(self, step: int) -> float:
        """Return the learning rate of 0-based `step`."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        rest = max(1, self.steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / rest)
        return self.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def new_optimizer(bank: CartridgeBank) -> torch.optim.Adam:
    """Return Adam over the trainable cartridge tokens only, without weight decay."""
    return torch.optim.Adam([bank.trainable], lr=0.0)


def check_fresh(samples: Sequence[Sample], version: int, staleness: int) -> int:
    """Return the number of tokens sampled by a version older than `version`. Raises StaleTokenError
    for a token older than the bound. Tokens written by the document teacher have no version and are
    never stale."""
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
    model: LanguageModel,
    bank: CartridgeBank,
    optimizer: torch.optim.Optimizer,
    batch: TrainBatch,
    channels: Sequence[LossChannel],
    *,
    lr: float,
    clip: float,
    row_tokens: int,
    version: int,
    staleness: int,
    micro_tokens: int | None = None,
    compare_gradients: bool = False,
    balance: GradientBalance | None = None,
    logit_bytes: int | None = None,
    recompute_layers: bool = False,
    gap_bounds: GapBounds | None = None,
    ranks: ProcessGroup = ALONE,
) -> TrainStepOutput:
    """Run one update with `channels`, all of nonzero weight, with the same result on all `ranks`.

    Raises StaleTokenError or DataError (nothing trained), RunError for a non-finite loss or ranks
    that differ.

    `micro_tokens` bounds the tokens of one forward, `logit_bytes` the logits that exist at a time,
    `recompute_layers` the activations kept to those of one layer: none of them changes a term.
    `gap_bounds` refuses tokens that sampler and trainer disagree on (StaleTokenError).
    `compare_gradients` costs one more backward per channel and changes no term either. `balance`
    replaces the weights by its coefficients, and is given the norms of the channels' gradients in
    the steps in which it is due, which run one backward per channel.
    """
    prepared = prepare(batch, channels, version)
    sampled = dict.fromkeys(channel.reads for channel in channels if channel.sampled)
    stale = check_fresh(prepared.samples(sampled), version, staleness)
    texts = prepared.samples()
    check_rows(texts, row_tokens)
    weights = {channel.name: channel.weight for channel in channels}
    counts = {channel.name: channel.denominator(batch) for channel in channels}
    tally, gap = LossAccumulator(weights), SamplerGap()
    measured = balance is not None and balance.is_due(version, [n for n, c in counts.items() if c])
    coefficients = weights if balance is None else balance.coefficients(weights)

    alone = {name: bank.frozen.shape[4] + bank.trainable.shape[4] for name in bank.names}
    prefix_tokens = prefix_lengths(texts, alone)
    together = is_sharded(model)  # every pass gathers the base: all ranks must run equally many
    tokens, fault = 0, ""
    optimizer.zero_grad(set_to_none=True)
    for part in prepared.split(micro_tokens, ranks.rank, ranks.world, even=together):
        micro = prepared.micro_batch(
            part, lambda samples: pack(samples, prefix_tokens, row_tokens, prefix_name)
        )
        packed = micro.packed

        prefixes = student_prefixes(model, bank, packed.names)
        student = response_tokens(
            model,
            packed,
            [kv.to(model.dtype) for kv in prefixes],
            logit_bytes=logit_bytes,
            recompute_layers=recompute_layers,
            noting=True,
        )

        terms = {c.name: c.term(student, micro) for c in channels if micro.tokens[c.name].items}
        means = {name: term.total / max(counts[name], 1) for name, term in terms.items()}
        for name, mean in means.items():
            if not torch.isfinite(mean):
                fault = fault or (
                    f"{name} became {mean.item()} at version {version}; lower train.lr (now {lr:g})"
                )
        if micro.sampled.compared.any():
            gap.add(micro.sampled, student.observed())
        tokens += len(packed.targets)
        tally.add(terms, means)
        nothing = [0.0 * student.hidden.sum()] if together else []
        if compare_gradients or measured:
            tally.add_gradients(means, bank.trainable, *nothing)
        if not measured:
            weighted = [coefficients[name] * mean for name, mean in means.items()] + nothing
            sum(weighted[1:], weighted[0]).backward()  # type: ignore[no-untyped-call]  # torch's own

    found = ranks.gather(
        {
            "fault": fault,
            "stands": [version, bank.fingerprint()],
            "tokens": tokens,
            "sums": tally.sums(),
            "gap": gap.sums(),
        }
    )
    _check_agreement(found)
    gap = SamplerGap.of_ranks([one["gap"] for one in found])
    gap.refuse(gap_bounds, version)
    tally.merge([one["sums"] for one in found], ranks.add, bank.trainable)
    if balance is not None and measured:
        balance.add(tally.norms())
        coefficients = balance.coefficients(weights)
        bank.trainable.grad = tally.gradient(coefficients)
    elif texts:
        if bank.trainable.grad is None:  # this rank had no micro-batch
            bank.trainable.grad = torch.zeros_like(bank.trainable)
        ranks.add(bank.trainable.grad)
    norm = torch.nn.utils.clip_grad_norm_([bank.trainable], clip)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    facts = {channel.name: channel.facts(batch) for channel in channels}
    told = tally.terms(counts, facts)
    return TrainStepOutput(
        compute_seconds=0.0,  # measured by the caller
        version=version + 1,
        kl=tally.values.get("doc_kl", 0.0),
        grad_norm=norm.item(),
        lr=lr,
        tokens=sum(one["tokens"] for one in found),
        stale_tokens=stale,
        terms=told if balance is None else balance.report(told, coefficients),
        cosines=tally.cosines() if compare_gradients else {},
        sampler_gap=gap.facts(),
    )


def _check_agreement(found: list[dict[str, Any]]) -> None:
    """Raise RunError if a rank met a fault, or if versions or cartridges differ in any bit."""
    for one in found:
        if one["fault"]:
            raise RunError(one["fault"])
    differ = [rank for rank, one in enumerate(found) if one["stands"] != found[0]["stands"]]
    if differ:
        raise RunError(
            f"trainer ranks {differ} stand at other versions or cartridges than rank 0; nothing "
            "was trained: start all ranks anew and recover from the trainer's last state"
        )
