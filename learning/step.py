"""Run one training step: one optimizer update of the cartridges that a given batch trains.

    batch (its caller sampled it; its versions are checked here)
      -> channels of weight 0 left out; advantages; each channel's own denominator for each
         cartridge
      -> this rank's micro-batches, each packed over shared prefixes: samples of all channels
         together, and a text that several channels train on once; on a CPU several run beside each
         other (`learning.ranks`), with the same sums
      -> student forward: the only forward with gradient
      -> given teacher distributions over the same tokens, against the student's logits, which
         exist for a chunk of tokens at a time
      -> the sampler's log-probabilities compared with those of these logits: a step of tokens that
         this version did not sample is refused before the update
      -> one named term for each channel and cartridge over its own denominator, times its weight
      -> backward into the cartridges only: one of the sum, or one for each channel where the
         channels are balanced (`plugins.objectives.balance`)
      -> sums over all ranks -> of each cartridge that has a loss: clip -> Adam

Advantages and denominators are those of the whole batch, which every rank receives, so neither
ranks nor micro-batches change a term. Ranks that stand apart hold a bank each: a rank reads the
samples of its own cartridges and updates these, and all ranks return the whole step's output.

A rollout that is trained in several updates runs this for each, with the log-probabilities before
the first as scores (the plug-in `objectives`).

Left out on purpose: a gradient of the base model, and a value function.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from cartridge_forge.learning.batch import (
    Member,
    MicroBatch,
    PreparedBatch,
    SampledTokens,
    check_ids,
    check_rows,
    pack,
    prepare,
    response_tokens,
    tokens_of,
)
from cartridge_forge.learning.cartridge import (
    CartridgeBank,
    prefix_lengths,
    prefix_name,
    student_prefixes,
)
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.losses.channel import (
    LossAccumulator,
    LossChannel,
    LossTerm,
    cosines,
    gradients_by_channel,
    gradients_of,
)
from cartridge_forge.learning.ranks import ALONE, ProcessGroup, concurrently, passes_beside
from cartridge_forge.learning.trainer_state import CartridgeProgress
from cartridge_forge.protocols.errors import RunError, StaleTokenError
from cartridge_forge.protocols.plugins import resolve
from cartridge_forge.protocols.spec.sections import GapBounds
from cartridge_forge.protocols.step import OFFLINE_VERSION, Sample, TrainBatch, TrainStepOutput


@dataclass(frozen=True)
class StepOptions:
    """Configure a training step.

    clip               most norm of a cartridge's gradient
    row_tokens         most tokens of a sample
    staleness          by how many versions a token may be older than the version being trained
    micro_tokens       most tokens that are trained at a time, in one forward or in several beside
                       each other; None: all
    logit_bytes        most bytes of their logits that exist at a time; None: all
    recompute_layers   keep the activations of one layer alone: none of these three changes a term
    gap_bounds         how far sampler and trainer may disagree on a token; None: not compared
    compare_gradients  report the cosines between the channels' gradients, for one more backward of
                       each channel; changes no term
    observe            is given this rank's terms of every micro-batch
    """

    clip: float
    row_tokens: int
    staleness: int
    micro_tokens: int | None = None
    logit_bytes: int | None = None
    recompute_layers: bool = False
    gap_bounds: GapBounds | None = None
    compare_gradients: bool = False
    observe: Callable[[Mapping[str, LossTerm], MicroBatch], None] | None = None


def train_step(
    model: LanguageModel,
    bank: CartridgeBank,
    progress: Mapping[str, CartridgeProgress],
    batch: TrainBatch,
    channels: Sequence[LossChannel],
    version: int,
    options: StepOptions,
    ranks: ProcessGroup = ALONE,
) -> TrainStepOutput:
    """Run one update with `channels`, all of nonzero weight, with the same result on all `ranks`.
    `progress` is that of each cartridge of `bank`; one without a loss-bearing token in the batch is
    not changed by a bit. A bank of a rank that stands apart has this rank's cartridges alone.

    Raises StaleTokenError or DataError (nothing trained), RunError for a non-finite loss or ranks
    that differ.

    The balance of a cartridge replaces the weights by its coefficients, and is given the norms of
    the channels' gradients in the steps in which it is due, which run one backward per channel.
    """
    step = prepare_step(model, bank, progress, batch, channels, version, options, ranks)
    sums = StepSums(LossAccumulator(step.weights, step.totals), SamplerGap())
    for parameter in step.parameters.values():
        parameter.grad = None
    for micro in concurrently(partial(forward_backward, step), step.parts, step.passes):
        sums.add(step, micro)
        del micro  # its gradients are as large as the cartridges
    reduce(step, sums)
    return update(step, sums)


@dataclass(frozen=True)
class PreparedStep:
    """Hold the inputs of a step, checked, and what follows from the whole batch.

    read           the samples and items of the batch's channels
    stale_tokens   how many tokens an older version sampled
    weights        by channel
    counts         by channel and cartridge, the divisor of the channel's total; `totals` by channel
    learners       the progress of the cartridges that have a loss-bearing token
    due            those whose balance is given the norms of the channels' gradients
    parameters     the trainable part [L, 2, H_kv, P-F, D] of each learner
    plain          those of them that train on one backward of the weighted sum
    compared       those of which each channel's own gradient is computed
    coefficients   by cartridge and channel, what a mean is multiplied by
    prefix_tokens  by prefix, its length
    parts          this rank's micro-batches, of which `passes` run beside each other
    """

    model: LanguageModel
    bank: CartridgeBank
    progress: Mapping[str, CartridgeProgress]
    batch: TrainBatch
    channels: Sequence[LossChannel]
    version: int
    options: StepOptions
    ranks: ProcessGroup
    read: PreparedBatch
    stale_tokens: int
    weights: Mapping[str, float]
    counts: Mapping[str, Mapping[str, int]]
    totals: Mapping[str, int]
    learners: Mapping[str, CartridgeProgress]
    due: Sequence[str]
    parameters: Mapping[str, Parameter]
    plain: Mapping[str, Parameter]
    compared: Mapping[str, Parameter]
    coefficients: dict[str, Mapping[str, float]]
    prefix_tokens: Mapping[str, int]
    parts: Sequence[Sequence[Member]]
    passes: int


def prepare_step(
    model: LanguageModel,
    bank: CartridgeBank,
    progress: Mapping[str, CartridgeProgress],
    batch: TrainBatch,
    channels: Sequence[LossChannel],
    version: int,
    options: StepOptions,
    ranks: ProcessGroup,
) -> PreparedStep:
    """Check a batch before any forward pass, and divide it into this rank's micro-batches. Raises
    StaleTokenError or DataError as `train_step` does."""
    read = prepare(batch, channels, version)
    sampled = dict.fromkeys(channel.reads for channel in channels if channel.sampled)
    stale = check_fresh(read.samples(sampled), version, options.staleness)
    texts = read.samples()
    check_rows(texts, options.row_tokens)
    check_ids(texts, model)
    weights = {channel.name: channel.weight for channel in channels}
    counts = {channel.name: channel.denominators(batch) for channel in channels}
    learners = {
        n: progress[n] for n in bank.names if any(divisors.get(n) for divisors in counts.values())
    }
    due: list[str] = []
    coefficients: dict[str, Mapping[str, float]] = dict.fromkeys(learners, weights)
    for name, learner in learners.items():
        if learner.balance is not None:
            coefficients[name] = learner.balance.coefficients(weights)
            if learner.balance.is_due(
                learner.steps, [n for n, divisors in counts.items() if divisors.get(name)]
            ):
                due.append(name)
    tokens = sum(map(tokens_of, texts)) if options.micro_tokens is None else options.micro_tokens
    # Layers that run again are replaced in the model meanwhile.
    passes = 1 if options.recompute_layers else passes_beside(model, tokens)
    most = None if options.micro_tokens is None else options.micro_tokens // passes
    if ranks.apart:
        parts = read.split(most, only=bank.names, passes=passes)
    else:  # every pass of a sharded base gathers it: all ranks must run equally many
        share = ranks.data_rank, ranks.data_world
        parts = read.split(most, *share, even=model.sharded, passes=passes)
    parameters = {name: learner.parameter for name, learner in learners.items()}
    return PreparedStep(
        model, bank, progress, batch, channels, version, options, ranks, read, stale, weights,
        counts, {name: sum(divisors.values()) for name, divisors in counts.items()}, learners, due,
        parameters, {name: p for name, p in parameters.items() if name not in due},
        parameters if options.compare_gradients else {name: parameters[name] for name in due},
        coefficients, prefix_lengths(texts, {name: bank.tokens(name) for name in bank.names}),
        parts, passes,
    )  # fmt: skip


@dataclass(frozen=True)
class MicroGradients:
    """Hold the result of one micro-batch's forward and backward. `terms` have no graph; `observed`
    are the student's log-probabilities [N] of its tokens, where the sampler's are known;
    `gradients` are by cartridge, `by_channel` those of each channel alone. `fault` says what was
    not finite."""

    micro: MicroBatch
    terms: Mapping[str, LossTerm]
    observed: Tensor | None
    gradients: Mapping[str, Tensor]
    by_channel: Mapping[str, Mapping[str, Tensor]]
    fault: str


def forward_backward(step: PreparedStep, part: Sequence[Member]) -> MicroGradients:
    """Run forward and backward of one micro-batch. It may run beside another: whatever both would
    change is changed by its caller."""
    model, options = step.model, step.options
    # A micro-batch without samples reads one token over a cartridge that learns.
    spare = {name: step.prefix_tokens[name] for name in step.learners}
    micro = step.read.micro_batch(
        part,
        lambda samples: pack(
            samples, step.prefix_tokens if samples else spare, options.row_tokens, prefix_name
        ),
    )
    prefixes = student_prefixes(model, step.bank, micro.packed.names)  # [L, 2, H_kv, P_c, D] each
    student = response_tokens(
        model,
        micro.packed,
        [kv.to(model.dtype) for kv in prefixes],
        logit_bytes=None if options.logit_bytes is None else options.logit_bytes // step.passes,
        recompute_layers=options.recompute_layers,
        noting=True,
    )  # logits [N, V], read in chunks

    terms = {c.name: c.term(student, micro) for c in step.channels if micro.tokens[c.name].items}
    means = {
        name: {
            cartridge: total / max(step.counts[name][cartridge], 1)
            for cartridge, total in term.totals().items()
        }
        for name, term in terms.items()
    }  # scalars with graph
    fault = ""
    for name, of_cartridges in means.items():
        for cartridge, mean in of_cartridges.items():
            if not fault and not torch.isfinite(mean):
                fault = (
                    f"{name} became {mean.item()} at version {step.version}, of cartridge "
                    f"{cartridge}; lower train.lr (now {step.progress[cartridge].lr:g})"
                )
    observed = student.observed() if micro.sampled.compared.any() else None  # [N]
    zero = 0.0 * student.hidden.sum() if model.sharded else None
    by_channel = {}
    if step.compared:
        channel_means = {
            name: functools.reduce(add, of_cartridges.values())
            for name, of_cartridges in means.items()
        }
        by_channel = gradients_by_channel(channel_means, step.compared, step.weights, zero)
    weighted = [
        step.coefficients[cartridge][name] * mean
        for name, of_cartridges in means.items()
        for cartridge, mean in of_cartridges.items()
        if cartridge in step.plain
    ]
    if zero is not None:
        weighted.append(zero)
    gradients = {}
    if weighted and step.plain:
        gradients = gradients_of(functools.reduce(add, weighted), step.plain)
    values = {name: replace(term, losses=term.losses.detach()) for name, term in terms.items()}
    return MicroGradients(micro, values, observed, gradients, by_channel, fault)


@dataclass
class StepSums:
    """Add up a step's micro-batches: of this rank, and after `reduce` of all."""

    tally: LossAccumulator
    gap: SamplerGap
    tokens: int = 0
    fault: str = ""

    def add(self, step: PreparedStep, one: MicroGradients) -> None:
        """Add a micro-batch; its gradients are added to those of the cartridges."""
        self.fault = self.fault or one.fault
        if one.observed is not None:
            self.gap.add(one.micro.sampled, one.observed)
        self.tokens += len(one.micro.packed.targets)
        self.tally.add(one.terms)
        self.tally.add_gradients(one.by_channel)
        if step.options.observe is not None:
            step.options.observe(one.terms, one.micro)
        for name, gradient in one.gradients.items():  # [L, 2, H_kv, P-F, D]
            if (total := step.plain[name].grad) is None:
                step.plain[name].grad = gradient
            else:
                total += gradient


def reduce(step: PreparedStep, sums: StepSums) -> None:
    """Replace the sums, and the gradients of the cartridges, by those of all ranks. Raises RunError
    if a rank met a fault, or if versions or cartridges differ in any bit, StaleTokenError for
    tokens that sampler and trainer disagree on."""
    ranks, tally = step.ranks, sums.tally
    reports = ranks.gather(
        {
            "fault": sums.fault,
            "state": [step.version, None if ranks.apart else step.bank.fingerprint(step.learners)],
            "tokens": sums.tokens,
            "sums": tally.sums(),
            "gap": sums.gap.sums(),
        }
    )
    for report in reports:
        if report["fault"]:
            raise RunError(report["fault"])
    differ = [rank for rank, one in enumerate(reports) if one["state"] != reports[0]["state"]]
    if differ:
        raise RunError(
            f"trainer ranks {differ} stand at other versions or cartridges than rank 0; nothing "
            "was trained: start all ranks anew and recover from the trainer's last state"
        )
    reports = reports[:: ranks.tensor]  # ranks that divide one base computed the same numbers
    sums.gap = SamplerGap.of_ranks([one["gap"] for one in reports])
    sums.gap.refuse(step.options.gap_bounds, step.version)
    sums.tokens = sum(one["tokens"] for one in reports)
    tally.merge([one["sums"] for one in reports], ranks.add_gradients, step.parameters)
    for name in step.due:
        balance = step.learners[name].balance
        assert balance is not None
        balance.add(tally.norms(name))
        step.coefficients[name] = balance.coefficients(step.weights)
        step.parameters[name].grad = tally.gradient(name, step.coefficients[name])
    for parameter in step.plain.values():
        if parameter.grad is None:  # this rank had no micro-batch of it
            parameter.grad = torch.zeros_like(parameter)
    ranks.add_gradients([p.grad for p in step.plain.values() if p.grad is not None])


def update(step: PreparedStep, sums: StepSums) -> TrainStepOutput:
    """Clip each cartridge's gradient, make its update, and return the step's output."""
    tally, ranks, options = sums.tally, step.ranks, step.options
    tokens = step.read.tokens()
    outcome: dict[str, Any] = {
        "lr": max((step.progress[n].lr for n in step.learners or step.progress), default=0.0),
        "updates": {
            name: {
                "lr": learner.lr, "grad_norm": learner.update(options.clip),
                "step": learner.steps + 1, "tokens": tokens[name],
            }
            for name, learner in step.learners.items()
        },
        "norms": {name: tally.norms(name) for name in step.compared},
        "coefficients": step.coefficients,
        "balance": {
            n: p.balance.means() for n, p in step.learners.items() if p.balance is not None
        },
        "products": tally.products() if options.compare_gradients else {},
    }  # fmt: skip
    outcomes = ranks.gather(outcome) if ranks.apart else [outcome]
    updates, norms, coefficients, balances = (
        # By cartridge: one rank's in its own order, those of several by name.
        outcome[key] if len(outcomes) == 1
        else dict(sorted(chain.from_iterable(one[key].items() for one in outcomes)))
        for key in ("updates", "norms", "coefficients", "balance")
    )  # fmt: skip
    terms = tally.terms({channel.name: channel.facts(step.batch) for channel in step.channels})
    if norms or balances:
        report = resolve("hooks", "balance_report")
        terms = report(terms, list(balances.values()), coefficients, norms)
    lr = max((one["lr"] for one in updates.values()), default=max(one["lr"] for one in outcomes))
    return TrainStepOutput(
        compute_seconds=0.0,  # measured by the caller
        version=step.version + 1,
        kl=tally.values.get("doc_kl", 0.0),
        grad_norm=math.hypot(*(one["grad_norm"] for one in updates.values())),
        lr=lr,
        tokens=sums.tokens,
        stale_tokens=step.stale_tokens,
        terms=terms,
        cosines=cosines(one["products"] for one in outcomes) if options.compare_gradients else {},
        sampler_gap=sums.gap.facts(),
        cartridges=updates,
    )


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


@dataclass
class SamplerGap:
    """Sum the gaps of a step's micro-batches. A log-probability that is no number counts as an
    infinite gap."""

    tokens: int = 0
    absolute: float = 0.0
    signed: float = 0.0
    most: float = 0.0
    worst: dict[str, Any] = field(default_factory=dict)

    def add(self, record: SampledTokens, trainer: Tensor) -> None:
        """Add a micro-batch: its record, and the trainer's log-probabilities [N]."""
        at = record.compared.nonzero().flatten()
        if not len(at):
            return
        values = trainer.detach().cpu()[at].double()
        gaps = values - record.logprobs[at].double()
        sizes = gaps.abs().nan_to_num(nan=math.inf, posinf=math.inf)
        self.tokens += len(at)
        self.absolute += sizes.sum().item()
        self.signed += gaps.sum().item()
        largest = int(sizes.argmax())
        if sizes[largest] >= self.most:
            index = int(at[largest])
            self.most = sizes[largest].item()
            self.worst = {
                "sample": record.locate(index),
                "sampler": record.logprobs[index].item(),
                "trainer": values[largest].item(),
            }

    def sums(self) -> dict[str, Any]:
        """Return this rank's sums, JSON-able."""
        return dict(vars(self))

    @classmethod
    def of_ranks(cls, sums: Sequence[Mapping[str, Any]]) -> SamplerGap:
        """Return the sums of all ranks, added in their order."""
        most = max(sums, key=lambda one: one["most"])
        return cls(
            sum(one["tokens"] for one in sums),
            sum(one["absolute"] for one in sums),
            sum(one["signed"] for one in sums),
            most["most"],
            dict(most["worst"]),
        )

    def refuse(self, bounds: GapBounds | None, version: int) -> None:
        """Raise StaleTokenError, with the worst sample's id in `samples`, for gaps outside the
        bounds."""
        if bounds is None or not self.tokens:
            return
        mean = self.absolute / self.tokens
        if mean <= bounds.mean and self.most <= bounds.max:
            return
        error = StaleTokenError(
            f"the sampler's log-probabilities of {self.tokens} tokens are {mean:.3g} nats from the "
            f"trainer's under version {version} on average, and {self.most:.3g} at most (bounds "
            f"{bounds.mean:g} and {bounds.max:g}, train.sampler_gap), most in sample "
            f"{self.worst['sample']} ({self.worst['sampler']:.4f} against "
            f"{self.worst['trainer']:.4f}): they were sampled over other numbers than version "
            f"{version}'s; nothing was trained on them; repair or replace the generator that "
            "sampled them, then resume the run; if the gap is this backend's rounding, raise the "
            "bounds"
        )
        error.samples = (self.worst["sample"],)
        raise error

    def facts(self) -> dict[str, float]:
        """Return {"mean": of |gap|, "signed": mean of gap, "max": of |gap|, "tokens": compared};
        empty where none was compared."""
        if not self.tokens:
            return {}
        return {
            "mean": self.absolute / self.tokens,
            "signed": self.signed / self.tokens,
            "max": self.most,
            "tokens": self.tokens,
        }
