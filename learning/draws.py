"""Change logits as a request's rules say, in the order of vLLM's sampler.

penalise      bias, then the penalties for repetition, frequency and presence
(grammar)     what may not follow is left out
leave_likely  min_p at the temperature of the draw, before top_k and top_p
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from cartridge_forge.protocols.logit_rules import LogitRules
from cartridge_forge.protocols.step import Sampling


def penalise(
    logits: Tensor, rules: LogitRules, prompt_ids: Iterable[int], response_ids: Sequence[int]
) -> None:
    """Change logits [V] in place by the bias and the penalties of `rules`, for the next token of a
    response to a prompt. Ids from V on are left alone: nothing draws them."""

    def at(ids: Iterable[int]) -> Tensor:
        token_ids = sorted({i for i in ids if i < len(logits)})
        return torch.tensor(token_ids, dtype=torch.long, device=logits.device)

    if rules.bias:
        added = dict(rules.bias)
        ids = at(added)
        logits[ids] += logits.new_tensor([added[i] for i in ids.tolist()])
    if rules.repetition_penalty != 1.0:
        ids = at((*prompt_ids, *response_ids))
        values, penalty = logits[ids], rules.repetition_penalty
        logits[ids] = torch.where(values > 0, values / penalty, values * penalty)
    if rules.frequency_penalty or rules.presence_penalty:
        counts = Counter(response_ids)
        ids = at(counts)
        times = logits.new_tensor([counts[i] for i in ids.tolist()])
        logits[ids] -= rules.frequency_penalty * times
        logits[ids] -= rules.presence_penalty


def leave_likely(logits: Tensor, rules: LogitRules, temperature: float) -> None:
    """Change logits [V] in place to -inf where a token's probability at this temperature is below
    `rules.min_p` times the likeliest token's. At temperature 0 nothing changes the choice."""
    if rules.min_p > 0 and temperature > 0:
        # p < min_p * p_max, where both have one denominator.
        least = logits.max().double() + temperature * math.log(rules.min_p)
        logits.masked_fill_(logits.double() < least, float("-inf"))


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Tensor:
    """Return inverse-CDF draws [B] from logits [B, V] with one uniform in [0, 1) each."""
    probs, order = truncated(logits, sampling)
    cumulative = probs.cumsum(-1)  # scaled by the last, so that no rounding moves a draw past it
    picks = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)
    picks = picks.clamp(max=probs.shape[-1] - 1)
    return (picks if order is None else order.gather(-1, picks))[:, 0]


def truncated(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Return the probabilities [B, V] (float64) to draw from at a temperature > 0, and the token of
    each column, None for the vocabulary's order. Truncation is top_k first, then the smallest set
    of mass >= top_p."""
    probs, order = (logits.double() / sampling.temperature).softmax(-1), None
    if sampling.top_k > 0 or sampling.top_p < 1.0:
        probs, order = torch.sort(probs, dim=-1, descending=True, stable=True)
        if sampling.top_k > 0:
            probs[:, sampling.top_k :] = 0
            probs = probs / probs.sum(-1, keepdim=True)
        if sampling.top_p < 1.0:
            preceding = probs.cumsum(-1) - probs
            probs = probs.masked_fill(preceding >= sampling.top_p, 0)
            probs = probs / probs.sum(-1, keepdim=True)
    return probs, order


def uniforms(seed: int, count: int, first: int = 0) -> Tensor:
    """Return draws `first` to `first + count` [count] of a request's own stream, float64 in [0, 1):
    draw t decides token t."""
    stream = torch.Generator().manual_seed(seed)
    return torch.rand(first + count, generator=stream, dtype=torch.float64)[first:]
