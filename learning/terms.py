"""Terms: what each channel adds to the loss of one step, and how micro-batches add them up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor


@dataclass(frozen=True)
class Term:
    """One channel over one micro-batch; its value is total / max(1, count over all of them).

    total   scalar with graph
    count   its own denominator
    facts   detached scalars summed over `items` (trained tokens, or pairs), for the report
    """

    total: Tensor
    count: int
    items: int
    facts: Mapping[str, Tensor] = field(default_factory=dict)


class Tally:
    """What the micro-batches of one step add up to, for the channels that weigh something.

    `values[channel]` is 0 for a channel without data.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self.values = dict.fromkeys(weights, 0.0)
        self._counts = dict.fromkeys(weights, 0)
        self._items = dict.fromkeys(weights, 0)
        self._facts: dict[str, dict[str, float]] = {name: {} for name in weights}
        self._gradients: dict[str, Tensor] = {}

    def add(self, terms: Mapping[str, Term], means: Mapping[str, Tensor]) -> None:
        """Add a micro-batch: its terms, and their totals over the step's denominators."""
        for name, term in terms.items():
            facts = self._facts[name]
            self.values[name] += means[name].item()
            self._counts[name] += term.count
            self._items[name] += term.items
            for fact, value in term.facts.items():
                facts[fact] = facts.get(fact, 0.0) + value.item()

    def add_gradients(self, means: Mapping[str, Tensor], parameter: Tensor) -> None:
        """Add each channel's own gradient; the graph is kept for the backward that trains."""
        for name, mean in means.items():
            (gradient,) = torch.autograd.grad(mean, parameter, retain_graph=True)
            held = self._gradients.get(name)
            self._gradients[name] = gradient if held is None else held + gradient

    def terms(
        self, counts: Mapping[str, int], facts: Mapping[str, Mapping[str, float]]
    ) -> dict[str, dict[str, float]]:
        """By channel: value, count, weight, the means of its facts, those given, and grad_norm."""
        found = {}
        for name, weight in self._weights.items():
            assert self._counts[name] == counts[name], (name, self._counts[name], counts[name])
            items = max(self._items[name], 1)
            found[name] = {
                "value": self.values[name],
                "count": counts[name],
                "weight": weight,
                **{fact: value / items for fact, value in self._facts[name].items()},
                **facts.get(name, {}),
            }
            if name in self._gradients:
                found[name]["grad_norm"] = self._gradients[name].double().norm().item()
        return found

    def cosines(self) -> dict[str, float]:
        """The cosine between the gradients of every two channels, {"grpo/sdpo": 0.31}; a pair of
        which one is zero has no angle and is left out."""
        flat = {name: g.flatten().double() for name, g in self._gradients.items() if g.any()}
        return {
            f"{a}/{b}": (flat[a] @ flat[b] / (flat[a].norm() * flat[b].norm())).item()
            for a, b in combinations([name for name in self._weights if name in flat], 2)
        }
