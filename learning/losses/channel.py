"""Define the interface of a loss channel: the samples it reads, its loss term and its denominator.
Open those of a step.

    total = sum over channels of  weight * total / denominator

A channel of weight 0 is not even imported, so the step is bit for bit the step without it. A
channel without data contributes 0 and no gradient. A new channel is a class of this interface that
the table of plug-ins names; its weight and its keys are in a subclass of `ObjectiveSpec`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from cartridge_forge.learning.batch import BatchReader, ChunkedLogits, MicroBatch
from cartridge_forge.learning.teacher import TeacherDistribution
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.plugins import resolve
from cartridge_forge.protocols.spec.sections import LossSpec, ObjectiveSpec
from cartridge_forge.protocols.step import TrainBatch


class LossChannel(BatchReader, Protocol):
    """Define one term of the objective: the sum over cartridges of weight * total / denominator.
    As a BatchReader it tells which samples it reads, and which of their tokens bear the loss.

    Total and denominator are of the samples that train the cartridge, so what a cartridge learns
    does not depend on the others in the batch.

    weight  a channel of weight 0 is left out of the step
    """

    weight: float

    @classmethod
    def from_spec(cls, objective: ObjectiveSpec, loss: LossSpec) -> Self:
        """Return the channel; one of weight 0 is left out of every step."""
        ...

    def at(self, step: int) -> Self:
        """Return the channel for 0-based `step`."""
        return self

    def references(self, updates: int) -> frozenset[str]:
        """Return the names of the log-probabilities in `batch.scores` that the trainer computes
        before the first of a rollout's `updates`: see `plugins.objectives.policy_scores`."""
        return frozenset()

    def of_rollout(self, batch: TrainBatch) -> Mapping[str, Any]:
        """Return what the parts of a divided rollout must know of the whole, as further scores."""
        return {}

    def denominators(self, batch: TrainBatch) -> Mapping[str, int]:
        """Return by cartridge that learns the divisor of its total over the whole batch; a
        cartridge without data is left out or has 0."""
        ...

    def facts(self, batch: TrainBatch) -> Mapping[str, float]:
        """Return further metrics of the whole batch; integers add up over parts of a rollout."""
        return {}

    def term(self, logits: ChunkedLogits, micro: MicroBatch) -> LossTerm:
        """Return the term over the channel's items in one micro-batch, which has at least one."""
        ...


@dataclass(frozen=True)
class LossTerm:
    """Hold one channel's term over one micro-batch.

    losses  [n] with graph: one of each loss-bearing token, or of each pair
    owners  the cartridges that the losses train, in order: (name, number of losses)
    count   the channel's own denominator, of all cartridges together
    facts   detached scalars summed over `items` (trained tokens, or pairs), reported as their mean
    shares  detached scalars (part, whole), reported as part / whole over all micro-batches
    """

    losses: Tensor
    count: int
    items: int
    facts: Mapping[str, Tensor] = field(default_factory=dict)
    shares: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    owners: Sequence[tuple[str, int]] = ()

    @property
    def total(self) -> Tensor:
        """Return the sum of the losses, a scalar with graph."""
        return self.losses.sum()

    def totals(self) -> dict[str, Tensor]:
        """Return by cartridge the sum of its losses, a scalar with graph."""
        names = dict.fromkeys(name for name, _ in self.owners)
        if len(names) == 1:
            return {name: self.total for name in names}
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        lengths = [n for _, n in self.owners]
        for (name, _), part in zip(self.owners, self.losses.split_with_sizes(lengths), strict=True):
            parts[name].append(part)
        return {name: torch.cat(losses).sum() for name, losses in parts.items()}


def counted(owners: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the sum of the numbers of each name."""
    counts: dict[str, int] = {}
    for name, n in owners:
        counts[name] = counts.get(name, 0) + n
    return counts


def check_scores(batch: TrainBatch, name: str, tokens: int, *, needed: bool) -> None:
    """Raise DataError unless `batch.scores[name]` covers `tokens` tokens, or is absent and not
    needed."""
    scores = batch.scores.get(name)
    if scores is None:
        if needed and tokens:
            raise DataError(
                f"the batch has no {name}, which this objective needs; score its samples with "
                "learning.teacher, or set the weight that asks for it to 0"
            )
        return
    covered = scores.tokens if isinstance(scores, TeacherDistribution) else len(scores)
    if covered != tokens:
        raise DataError(
            f"the batch's {name} speaks of {covered} tokens and its samples have {tokens}; give "
            "one entry for each response token, those not trained on included (of a hinted turn: "
            "for each of its tokens)"
        )


class LossAccumulator:
    """Add up the terms of a step's micro-batches, for channels of nonzero weight. `values[channel]`
    is 0 for a channel without data."""

    def __init__(self, weights: Mapping[str, float], counts: Mapping[str, int]) -> None:
        """Take by channel its weight and its denominator over the whole batch."""
        self._weights, self._totals = weights, counts
        self.values = dict.fromkeys(weights, 0.0)
        self._counts = dict.fromkeys(weights, 0)
        # by channel and fact: a sum, and what it is divided by
        self._facts: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in weights}
        # by channel and cartridge
        self._gradients: dict[str, dict[str, Tensor]] = {}

    def add(self, terms: Mapping[str, LossTerm]) -> None:
        """Add a micro-batch's terms."""
        for name, term in terms.items():
            self.values[name] += (term.total.detach() / max(self._totals[name], 1)).item()
            self._counts[name] += term.count
            for fact, value in term.facts.items():
                self._add_fact(name, fact, value.item(), term.items)
            for fact, (part, divisor) in term.shares.items():
                self._add_fact(name, fact, part.item(), divisor.item())

    def add_gradients(self, by_channel: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Add what `gradients_by_channel` found in a micro-batch."""
        for name, gradients in by_channel.items():
            sums = self._gradients.setdefault(name, {})
            for cartridge, gradient in gradients.items():
                total = sums.get(cartridge)
                sums[cartridge] = gradient if total is None else total + gradient

    def sums(self) -> dict[str, Any]:
        """Return this rank's sums, JSON-able."""
        return {
            "values": self.values,
            "counts": self._counts,
            "facts": self._facts,
            "compared": {name: list(gradients) for name, gradients in self._gradients.items()},
        }

    def merge(
        self,
        sums: Sequence[Mapping[str, Any]],
        add: Callable[[Sequence[Tensor]], None],
        parameters: Mapping[str, Tensor],
    ) -> None:
        """Replace the sums by those of all ranks, added in the order of ranks. `add` sums gradients
        over the ranks; the cartridges `parameters` give the order and the shapes."""
        first, *later = sums
        self.values, self._counts = dict(first["values"]), dict(first["counts"])
        self._facts = {name: dict(facts) for name, facts in first["facts"].items()}
        for other in later:
            for name in self._weights:
                self.values[name] += other["values"][name]
                self._counts[name] += other["counts"][name]
                for fact, (part, divisor) in other["facts"][name].items():
                    self._add_fact(name, fact, part, divisor)
        gradients: dict[str, dict[str, Tensor]] = {}
        for name in self._weights:
            compared = {cartridge for one in sums for cartridge in one["compared"].get(name, ())}
            local = self._gradients.get(name, {})
            for cartridge in [c for c in parameters if c in compared]:
                gradient = local.get(cartridge, torch.zeros_like(parameters[cartridge]))
                gradients.setdefault(name, {})[cartridge] = gradient.contiguous()
        add(
            [
                gradient
                for of_cartridges in gradients.values()
                for gradient in of_cartridges.values()
            ]
        )
        self._gradients = gradients

    def terms(self, facts: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
        """Return by channel: value, count, weight, the means of its facts, and those given."""
        terms = {}
        for name, weight in self._weights.items():
            counts = self._counts[name], self._totals[name]
            assert counts[0] == counts[1], (name, *counts)
            terms[name] = {
                "value": self.values[name],
                "count": self._totals[name],
                "weight": weight,
                **{
                    fact: part / divisor if divisor else 0.0
                    for fact, (part, divisor) in self._facts[name].items()
                },
                **facts.get(name, {}),
            }
        return terms

    def norms(self, cartridge: str) -> dict[str, float]:
        """Return the norm of each channel's own gradient of a cartridge, where gradients were
        added."""
        return {
            name: _norm(gradients[cartridge])
            for name, gradients in self._gradients.items()
            if cartridge in gradients
        }

    def gradient(self, cartridge: str, coefficients: Mapping[str, float]) -> Tensor | None:
        """Return the sum of the channels' gradients of a cartridge times `coefficients`; None
        without any."""
        parts = [
            coefficients[name] * gradients[cartridge]
            for name, gradients in self._gradients.items()
            if cartridge in gradients
        ]
        return sum(parts[1:], parts[0]) if parts else None

    def products(self) -> dict[str, list[float]]:
        """Return, of the gradients of every two channels and the cartridges that both train, their
        inner product and the square of each one's norm: {"doc_kl/grpo": [0.31, 1.0, 1.0]}."""
        products = {}
        for (a, of_a), (b, of_b) in combinations(self._gradients.items(), 2):
            shared = [cartridge for cartridge in of_a if cartridge in of_b]
            if shared:
                first, second = _flat(of_a[c] for c in shared), _flat(of_b[c] for c in shared)
                pairs = (first, second), (first, first), (second, second)
                products[f"{a}/{b}"] = [(x @ y).item() for x, y in pairs]
        return products

    def _add_fact(self, name: str, fact: str, part: float, divisor: float) -> None:
        sums = self._facts[name].get(fact, (0.0, 0.0))
        self._facts[name][fact] = (sums[0] + part, sums[1] + divisor)


def gradients_of(
    loss: Tensor, parameters: Mapping[str, Tensor], *, again: bool = False
) -> dict[str, Tensor]:
    """Return the gradients of a loss by those of the cartridges `parameters` that it depends on;
    with `again` the graph is kept for another backward."""
    gradients = torch.autograd.grad(
        loss, list(parameters.values()), retain_graph=again, allow_unused=True
    )
    return {
        name: gradient.contiguous()
        for name, gradient in zip(parameters, gradients, strict=True)
        if gradient is not None
    }


def gradients_by_channel(
    means: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    channels: Iterable[str],
    nothing: Tensor | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Return each channel's own gradients of the cartridges `parameters`; the graph is kept for a
    backward that trains. With `nothing`, a zero with graph, each of `channels` runs a backward:
    ranks that share a base must run equally many."""
    by_channel = {}
    for name in means if nothing is None else channels:
        mean = means.get(name, nothing)
        assert mean is not None
        gradients = gradients_of(mean, parameters, again=True)
        if name in means:
            by_channel[name] = gradients
    return by_channel


def cosines(products: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the cosine between the gradients of every two channels, {"doc_kl/grpo": 0.31}, from
    the products that ranks with cartridges of their own told, without pairs in which one gradient
    is zero."""
    sums: dict[str, list[float]] = {}
    for one in products:
        for pair, parts in one.items():
            total = sums.get(pair, [0.0] * len(parts))
            sums[pair] = [a + b for a, b in zip(total, parts, strict=True)]
    return {
        pair: inner / math.sqrt(first * second)
        for pair, (inner, first, second) in sums.items()
        if first and second
    }


def _norm(gradient: Tensor) -> float:
    return float(gradient.double().norm())


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten().double() for tensor in tensors])


def active_channels(objective: ObjectiveSpec, loss: LossSpec | None = None) -> list[LossChannel]:
    """Return the channels of nonzero weight, in the order of `objective.weights`, before any
    warm-up (`LossChannel.at`). Raises SpecError for one whose plug-in is not installed."""
    loss = loss or LossSpec()
    return [
        resolve("channels", name).from_spec(objective, loss)
        for name, weight in objective.weights.items()
        if weight
    ]
