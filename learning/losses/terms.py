"""Describe each channel's part of a step's loss, and add the parts of micro-batches up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossTerm:
    """Hold one channel's term over one micro-batch; the loss is total / max(1, count over all of
    them).

    total   scalar with graph
    count   the channel's own denominator
    facts   detached scalars summed over `items` (trained tokens, or pairs), reported as their mean
    shares  detached scalars (part, whole), reported as part / whole over all micro-batches
    """

    total: Tensor
    count: int
    items: int
    facts: Mapping[str, Tensor] = field(default_factory=dict)
    shares: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class LossAccumulator:
    """Add up the terms of a step's micro-batches, for channels of nonzero weight. `values[channel]`
    is 0 for a channel without data."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self.values = dict.fromkeys(weights, 0.0)
        self._counts = dict.fromkeys(weights, 0)
        # by channel and fact: a sum, and what it is divided by
        self._facts: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in weights}
        self._gradients: dict[str, Tensor] = {}

    def add(self, terms: Mapping[str, LossTerm], means: Mapping[str, Tensor]) -> None:
        """Add a micro-batch: its terms, and their totals over the step's denominators."""
        for name, term in terms.items():
            self.values[name] += means[name].item()
            self._counts[name] += term.count
            for fact, value in term.facts.items():
                self._add_fact(name, fact, value.item(), term.items)
            for fact, (part, whole) in term.shares.items():
                self._add_fact(name, fact, part.item(), whole.item())

    def add_gradients(
        self, means: Mapping[str, Tensor], parameter: Tensor, nothing: Tensor | None = None
    ) -> None:
        """Add each channel's own gradient; the graph is kept for the backward that trains. With
        `nothing`, a zero with graph, every channel of nonzero weight runs a backward: ranks that
        share a base must run equally many."""
        for name in means if nothing is None else self._weights:
            mean = means.get(name, nothing)
            assert mean is not None
            (gradient,) = torch.autograd.grad(mean, parameter, retain_graph=True)
            if name in means:
                held = self._gradients.get(name)
                self._gradients[name] = gradient if held is None else held + gradient

    def sums(self) -> dict[str, Any]:
        """Return this rank's sums, JSON-able."""
        return {
            "values": self.values,
            "counts": self._counts,
            "facts": self._facts,
            "compared": list(self._gradients),
        }

    def merge(
        self, sums: Sequence[Mapping[str, Any]], add: Callable[[Tensor], None], like: Tensor
    ) -> None:
        """Replace the sums by those of all ranks, added in the order of ranks. `add` sums a tensor
        of the shape of `like` over the ranks."""
        first, *others = sums
        self.values, self._counts = dict(first["values"]), dict(first["counts"])
        self._facts = {name: dict(facts) for name, facts in first["facts"].items()}
        for other in others:
            for name in self._weights:
                self.values[name] += other["values"][name]
                self._counts[name] += other["counts"][name]
                for fact, (part, whole) in other["facts"][name].items():
                    self._add_fact(name, fact, part, whole)
        compared = {name for one in sums for name in one["compared"]}
        for name in [name for name in self._weights if name in compared]:
            gradient = self._gradients.get(name, torch.zeros_like(like)).contiguous()
            add(gradient)
            self._gradients[name] = gradient

    def terms(
        self, counts: Mapping[str, int], facts: Mapping[str, Mapping[str, float]]
    ) -> dict[str, dict[str, float]]:
        """Return by channel: value, count, weight, the means of its facts, those given, and
        grad_norm."""
        found = {}
        for name, weight in self._weights.items():
            assert self._counts[name] == counts[name], (name, self._counts[name], counts[name])
            found[name] = {
                "value": self.values[name],
                "count": counts[name],
                "weight": weight,
                **{
                    fact: part / whole if whole else 0.0
                    for fact, (part, whole) in self._facts[name].items()
                },
                **facts.get(name, {}),
            }
            if name in self._gradients:
                found[name]["grad_norm"] = self._gradients[name].double().norm().item()
        return found

    def cosines(self) -> dict[str, float]:
        """Return the cosine between the gradients of every two channels, {"doc_kl/grpo": 0.31},
        without pairs in which one gradient is zero."""
        flat = {name: g.flatten().double() for name, g in self._gradients.items() if g.any()}
        return {
            f"{a}/{b}": (flat[a] @ flat[b] / (flat[a].norm() * flat[b].norm())).item()
            for a, b in combinations([name for name in self._weights if name in flat], 2)
        }

    def _add_fact(self, name: str, fact: str, part: float, whole: float) -> None:
        held = self._facts[name].get(fact, (0.0, 0.0))
        self._facts[name][fact] = (held[0] + part, held[1] + whole)
