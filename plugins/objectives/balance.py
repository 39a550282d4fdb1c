"""Balance the loss channels: each channel's share of the gradient's norm follows its weight.

Every cartridge has a balance of its own: norms are those of its own gradient, so its coefficients
do not depend on the other cartridges of the batch.

    n_c            running mean of the norm of channel c's own gradient (of its value, unweighted)
    scale          sum of w_k * n_k / sum of w_k, over the channels k that have such a mean
    coefficient_c  w_c * scale / n_c, within [w_c / bound, w_c * bound]
    gradient       sum of coefficient_c * (gradient of c's value)

The coefficients of all channels together leave the sum of w_k * n_k as it is. A channel that is
alone has its weight as coefficient, exactly. The running mean is exponential with the factor DECAY,
corrected for its start at 0: a channel's first norm is its first mean.

A channel without data in a step, or with a gradient of exactly 0 (equal rewards), keeps its mean,
and counts for the scale: another channel does not grow because this one is silent. A channel that
never had a gradient has its weight as coefficient.

Source: after GradNorm (Chen et al. 2018), with the norms as measured in place of learnt weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

DECAY = 0.9


class GradientBalance:
    """Hold the running means of the norms of the channels' gradients of one cartridge. Norms are
    measured every `every` of the steps that train it, and whenever a channel with data has no mean
    yet."""

    def __init__(self, every: int = 1, bound: float = 100.0) -> None:
        self._every, self._bound = every, bound
        self._sums: dict[str, float] = {}  # exponential sums that start at 0
        self._counts: dict[str, int] = {}

    def is_due(self, step: int, channels: Collection[str]) -> bool:
        """Return whether the cartridge's 0-based `step` measures norms; `channels` have data in
        it."""
        return step % self._every == 0 or any(name not in self._counts for name in channels)

    def add(self, norms: Mapping[str, float]) -> None:
        """Add the norms of one step; a norm of 0 is left out."""
        for name, norm in norms.items():
            if 0 < norm < math.inf:
                average = self._sums.get(name, 0.0)
                self._sums[name] = DECAY * average + (1 - DECAY) * norm
                self._counts[name] = self._counts.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        """Return the running mean of each channel that has had a gradient."""
        return {n: total / (1 - DECAY ** self._counts[n]) for n, total in self._sums.items()}

    def coefficients(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Return each channel's coefficient; `weights` are those of the step, all above 0."""
        norms = self.means()
        means = {name: norms[name] for name in weights if name in norms}
        if len(means) < 2:
            return dict(weights)
        total = sum(weights[name] for name in means)
        scale = sum(weights[name] * mean for name, mean in means.items()) / total
        return {
            name: weight * min(max(scale / means[name], 1 / self._bound), self._bound)
            if name in means
            else weight
            for name, weight in weights.items()
        }

    def state(self) -> dict[str, Any]:
        """Return what the next step depends on, JSON-able."""
        return {"sums": dict(self._sums), "counts": dict(self._counts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what `state` returned; an empty mapping clears the means."""
        self._sums, self._counts = dict(state.get("sums", {})), dict(state.get("counts", {}))


def report(
    terms: Mapping[str, Mapping[str, float]],
    coefficients_known: Sequence[Mapping[str, float]],
    coefficients: Mapping[str, Mapping[str, float]],
    norms: Mapping[str, Mapping[str, float]],
) -> dict[str, dict[str, float]]:
    """Return the channels' terms, where norms were measured with that of the gradient of all
    cartridges together (grad_norm). `coefficients` and `norms` are keyed by cartridge.

    Of cartridges that are balanced, whose running means are `known`, also with their coefficient,
    the mean over the cartridges, with the norm of the running means together (mean_grad_norm), and
    where norms were measured with their share of the sum of coefficient * norm over all cartridges.
    """
    rows = {name: {**term, **_together(name, norms)} for name, term in terms.items()}
    if not coefficients_known:
        return rows
    sizes: dict[str, float] = {}
    for cartridge, of_name in norms.items():
        for name, norm in of_name.items():
            sizes[name] = sizes.get(name, 0.0) + coefficients[cartridge][name] * norm
    total = sum(sizes.values())
    for name in rows:
        if coefficients:
            rows[name]["coefficient"] = fmean(of[name] for of in coefficients.values())
        if means := [of[name] for of in coefficients_known if name in of]:
            rows[name]["mean_grad_norm"] = math.hypot(*means)
        if total and name in sizes:
            rows[name]["share"] = sizes[name] / total
    return rows


def _together(name: str, norms: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    values = [of_name[name] for of_name in norms.values() if name in of_name]
    return {"grad_norm": math.hypot(*values)} if values else {}
