"""Sample tokens by seeded draws: one uniform of a request's own stream decides each token."""

from __future__ import annotations

import torch
from torch import Tensor

from protocols.types import Sampling


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Tensor:
    """Return inverse-CDF draws [B] from logits [B, V] with one uniform in [0, 1) each. Truncation
    is top_k first, then the smallest set of mass >= top_p."""
    probs = (logits.double() / sampling.temperature).softmax(-1)
    order = torch.arange(probs.shape[-1], device=probs.device).expand_as(probs)
    if sampling.top_k > 0 or sampling.top_p < 1.0:
        probs, order = torch.sort(probs, dim=-1, descending=True, stable=True)
        if sampling.top_k > 0:
            probs[:, sampling.top_k :] = 0
            probs = probs / probs.sum(-1, keepdim=True)
        if sampling.top_p < 1.0:
            before = probs.cumsum(-1) - probs
            probs = probs.masked_fill(before >= sampling.top_p, 0)
            probs = probs / probs.sum(-1, keepdim=True)
    cumulative = probs.cumsum(-1)
    # Scaled by the last sum, so that rounding cannot push a draw past the last possible token.
    found = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)
    return order.gather(-1, found.clamp(max=probs.shape[-1] - 1))[:, 0]


def uniforms(seed: int, count: int, first: int = 0) -> Tensor:
    """Return draws `first` to `first + count` [count] of a request's own stream, float64 in [0, 1):
    draw t decides token t."""
    stream = torch.Generator().manual_seed(seed)
    return torch.rand(first + count, generator=stream, dtype=torch.float64)[first:]
