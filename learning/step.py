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
         channels are balanced (`learning.losses.balance`)
      -> sums over all ranks -> of each cartridge that has a loss: clip -> Adam

Advantages and denominators are those of the whole batch, which every rank receives, so neither
ranks nor micro-batches change a term. Ranks that stand apart hold a bank each: a rank reads the
samples of its own cartridges and updates these, and all ranks return the whole step's output.

A rollout that is trained in several updates runs this for each (`learning.updates`), with the
log-probabilities before the first as scores (`learning.policy_scores`).

Left out on purpose: a gradient of the base model, and a value function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from learning.batch import (
    Member,
    MicroBatch,
    SampledTokens,
    check_ids,
    check_rows,
    pack,
    prepare,
    response_tokens,
    tokens_of,
)
from learning.cartridge import CartridgeBank, prefix_lengths, prefix_name, student_prefixes
from learning.decoder import LanguageModel
from learning.losses.balance import report
from learning.losses.channel import (
    LossAccumulator,
    LossChannel,
    LossTerm,
    cosines,
    gradients_by_channel,
    gradients_of,
)
from learning.ranks import ALONE, ProcessGroup, beside, passes_beside
from learning.trainer_state import CartridgeProgress
from protocols.errors import RunError, StaleTokenError
from protocols.spec.sections import GapBounds
from protocols.train_batch import TrainBatch
from protocols.types import OFFLINE_VERSION, Sample, TrainStepOutput


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


@dataclass(frozen=True)
class _Pass:
    """Hold what forward and backward of one micro-batch found. `terms` have no graph; `observed`
    are the student's log-probabilities [N] of its tokens, where the sampler's are known;
    `gradients` are by cartridge, `by_channel` those of each channel alone."""

    micro: MicroBatch
    terms: Mapping[str, LossTerm]
    observed: Tensor | None
    gradients: Mapping[str, Tensor]
    by_channel: Mapping[str, Mapping[str, Tensor]]
    fault: str


def train_step(
    model: LanguageModel,
    bank: CartridgeBank,
    progress: Mapping[str, CartridgeProgress],
    batch: TrainBatch,
    channels: Sequence[LossChannel],
    *,
    clip: float,
    row_tokens: int,
    version: int,
    staleness: int,
    micro_tokens: int | None = None,
    compare_gradients: bool = False,
    logit_bytes: int | None = None,
    recompute_layers: bool = False,
    gap_bounds: GapBounds | None = None,
    observe: Callable[[Mapping[str, LossTerm], MicroBatch], None] | None = None,
    ranks: ProcessGroup = ALONE,
) -> TrainStepOutput:
    """Run one update with `channels`, all of nonzero weight, with the same result on all `ranks`.
    `progress` is that of each cartridge of `bank`; one without a loss-bearing token in the batch is
    not changed by a bit. A bank of a rank that stands apart has this rank's cartridges alone.

    Raises StaleTokenError or DataError (nothing trained), RunError for a non-finite loss or ranks
    that differ.

    `micro_tokens` bounds the tokens that are trained at a time, in one forward or in several beside
    each other, `logit_bytes` their logits that exist at a time, `recompute_layers` the activations
    kept to those of one layer: none of them changes a term.
    `gap_bounds` refuses tokens that sampler and trainer disagree on (StaleTokenError). `observe`
    gets this rank's terms of every micro-batch.
    `compare_gradients` costs one more backward per channel and changes no term either. The balance
    of a cartridge replaces the weights by its coefficients, and is given the norms of the channels'
    gradients in the steps in which it is due, which run one backward per channel.
    """
    prepared = prepare(batch, channels, version)
    sampled = dict.fromkeys(channel.reads for channel in channels if channel.sampled)
    stale = check_fresh(prepared.samples(sampled), version, staleness)
    texts = prepared.samples()
    check_rows(texts, row_tokens)
    check_ids(texts, model)
    weights = {channel.name: channel.weight for channel in channels}
    counts = {channel.name: channel.denominators(batch) for channel in channels}
    whole = {name: sum(of.values()) for name, of in counts.items()}
    learning = {
        name: progress[name] for name in bank.names if any(of.get(name) for of in counts.values())
    }
    balances = {n: p.balance for n, p in learning.items() if p.balance is not None}
    due = [
        name
        for name, balance in balances.items()
        if balance.is_due(learning[name].steps, [n for n, of in counts.items() if of.get(name)])
    ]
    coefficients = {
        name: balances[name].coefficients(weights) if name in balances else weights
        for name in learning
    }
    parameters = {name: p.parameter for name, p in learning.items()}
    plain = {name: p for name, p in parameters.items() if name not in due}
    compared = parameters if compare_gradients else {name: parameters[name] for name in due}
    tally, gap = LossAccumulator(weights, whole), SamplerGap()

    alone = {name: bank.tokens(name) for name in bank.names}
    prefix_tokens = prefix_lengths(texts, alone)
    spare = {name: alone[name] for name in learning}  # for a micro-batch without samples
    together = model.sharded  # every pass gathers the base: all ranks must run equally many
    # Layers that run again are replaced in the model meanwhile.
    at_a_time = sum(map(tokens_of, texts)) if micro_tokens is None else micro_tokens
    passes = 1 if recompute_layers else passes_beside(model, at_a_time)

    def run(part: Sequence[Member]) -> _Pass:
        """Run forward and backward of one micro-batch. It may run beside another: whatever both
        would change is changed below."""
        micro = prepared.micro_batch(
            part,
            lambda samples: pack(
                samples, prefix_tokens if samples else spare, row_tokens, prefix_name
            ),
        )
        packed = micro.packed

        prefixes = student_prefixes(model, bank, packed.names)
        student = response_tokens(
            model,
            packed,
            [kv.to(model.dtype) for kv in prefixes],
            logit_bytes=None if logit_bytes is None else logit_bytes // passes,
            recompute_layers=recompute_layers,
            noting=True,
        )

        terms = {c.name: c.term(student, micro) for c in channels if micro.tokens[c.name].items}
        means = {
            name: {
                cartridge: total / max(counts[name][cartridge], 1)
                for cartridge, total in term.totals().items()
            }
            for name, term in terms.items()
        }
        fault = ""
        for name, of in means.items():
            for cartridge, mean in of.items():
                if not torch.isfinite(mean):
                    fault = fault or (
                        f"{name} became {mean.item()} at version {version}, of cartridge "
                        f"{cartridge}; lower train.lr (now {progress[cartridge].lr:g})"
                    )
        observed = student.observed() if micro.sampled.compared.any() else None
        nothing = 0.0 * student.hidden.sum() if together else None
        by_channel = {}
        if compared:
            sums = {name: _sum(list(of.values())) for name, of in means.items()}
            by_channel = gradients_by_channel(sums, compared, weights, nothing)
        weighted = [
            coefficients[cartridge][name] * mean
            for name, of in means.items()
            for cartridge, mean in of.items()
            if cartridge in plain
        ]
        if nothing is not None:
            weighted.append(nothing)
        gradients = gradients_of(_sum(weighted), plain) if weighted and plain else {}
        done = {name: replace(term, losses=term.losses.detach()) for name, term in terms.items()}
        return _Pass(micro, done, observed, gradients, by_channel, fault)

    tokens, fault = 0, ""
    for parameter in parameters.values():
        parameter.grad = None
    each = None if micro_tokens is None else micro_tokens // passes
    if ranks.apart:
        parts = prepared.split(each, only=bank.names, passes=passes)
    else:
        place = ranks.data_rank, ranks.data_world
        parts = prepared.split(each, *place, even=together, passes=passes)
    for one in beside(run, parts, passes):
        fault = fault or one.fault
        if one.observed is not None:
            gap.add(one.micro.sampled, one.observed)
        tokens += len(one.micro.packed.targets)
        tally.add(one.terms)
        tally.add_gradients(one.by_channel)
        if observe is not None:
            observe(one.terms, one.micro)
        for name, gradient in one.gradients.items():
            if (held := plain[name].grad) is None:
                plain[name].grad = gradient
            else:
                held += gradient
        del one  # its gradients are as large as the cartridges

    found = ranks.gather(
        {
            "fault": fault,
            "stands": [version, None if ranks.apart else bank.fingerprint(learning)],
            "tokens": tokens,
            "sums": tally.sums(),
            "gap": gap.sums(),
        }
    )
    _check_agreement(found)
    found = [*ranks.of_copies(found)]
    gap = SamplerGap.of_ranks([one["gap"] for one in found])
    gap.refuse(gap_bounds, version)
    tally.merge([one["sums"] for one in found], ranks.add_gradients, parameters)
    norms = {name: tally.norms(name) for name in learning}
    for name in due:
        balances[name].add(norms[name])
        coefficients[name] = balances[name].coefficients(weights)
        parameters[name].grad = tally.gradient(name, coefficients[name])
    for parameter in plain.values():
        if parameter.grad is None:  # this rank had no micro-batch of it
            parameter.grad = torch.zeros_like(parameter)
    ranks.add_gradients([p.grad for p in plain.values() if p.grad is not None])
    own_tokens = prepared.tokens()
    updates = {
        name: {
            "lr": own.lr, "grad_norm": own.update(clip), "step": own.steps + 1,
            "tokens": own_tokens[name],
        }
        for name, own in learning.items()
    }  # fmt: skip
    done: dict[str, Any] = {
        "lr": max((progress[name].lr for name in learning or progress), default=0.0),
        "updates": updates,
        "norms": norms,
        "coefficients": coefficients,
        "balance": {name: balance.means() for name, balance in balances.items()},
        "products": tally.products() if compare_gradients else {},
    }
    told = ranks.gather(done) if ranks.apart else [done]
    updates, norms, coefficients, known = (
        _united([one[key] for one in told])
        for key in ("updates", "norms", "coefficients", "balance")
    )
    return TrainStepOutput(
        compute_seconds=0.0,  # measured by the caller
        version=version + 1,
        kl=tally.values.get("doc_kl", 0.0),
        grad_norm=math.hypot(*(update["grad_norm"] for update in updates.values())),
        lr=max((update["lr"] for update in updates.values()), default=max(o["lr"] for o in told)),
        tokens=sum(one["tokens"] for one in found),
        stale_tokens=stale,
        terms=report(
            tally.terms({channel.name: channel.facts(batch) for channel in channels}),
            list(known.values()),
            coefficients,
            norms,
        ),
        cosines=cosines(one["products"] for one in told),
        sampler_gap=gap.facts(),
        cartridges=updates,
    )


def _united(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what each rank told of its own cartridges, by name; one rank's in its own order."""
    return dict(told[0]) if len(told) == 1 else dict(sorted(chain(*(of.items() for of in told))))


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return sum(parts[1:], parts[0])


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
        own = trainer.detach().cpu()[at].double()
        gaps = own - record.logprobs[at].double()
        sizes = gaps.abs().nan_to_num(nan=math.inf, posinf=math.inf)
        self.tokens += len(at)
        self.absolute += sizes.sum().item()
        self.signed += gaps.sum().item()
        largest = int(sizes.argmax())
        if sizes[largest] >= self.most:
            place = int(at[largest])
            self.most = sizes[largest].item()
            self.worst = {
                "sample": record.locate(place),
                "sampler": record.logprobs[place].item(),
                "trainer": own[largest].item(),
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
