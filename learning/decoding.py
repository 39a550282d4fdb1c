"""Batched decoding over shared prefixes, with seeded sampling per request.

The embedded backend of the `Generate` port: token ids in, token ids out. Each prefix is held once
for the batch; every request draws from its own seeded stream, so its tokens do not depend on what
else is in the batch; every token carries its log-probability and its prefix's version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from learning.attention import DecodeCache, PrefixContext
from learning.batching import stack_prefixes
from learning.model import hidden_states, kv_shape
from protocols.errors import DataError, PublishError
from protocols.types import Completion, GenerateRequest, PrefixRef, Sampling, refused

Lookup = Callable[[PrefixRef], Tensor]


@dataclass
class _Row:
    """One request being decoded."""

    index: int
    request: GenerateRequest
    uniforms: Tensor  # [max_tokens] float64 in [0, 1): one draw for each token, made beforehand
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: tuple[float, ...] = ()
    reason: str = ""
    error: str = ""


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    requests: Sequence[GenerateRequest],
    lookup: Lookup,
    end_ids: frozenset[int],
) -> list[Completion]:
    """Complete every request; answers in the order of the requests.

    `lookup` gives a prefix's keys and values [L, 2, H_kv, P, D], or raises PublishError: the
    requests over that prefix are then refused, and no other. Raises DataError for an empty prompt.
    """
    rows = [_Row(i, r, uniforms(r.seed, r.sampling.max_tokens)) for i, r in enumerate(requests)]
    groups: dict[PrefixRef, list[_Row]] = {}
    for row in rows:
        if not row.request.prompt_ids:
            raise DataError(f"request {row.request.id} has an empty prompt; give it a token")
        groups.setdefault(row.request.prefix, []).append(row)
    if not rows:
        return []

    def found(ref: PrefixRef) -> Tensor | None:
        try:
            return lookup(ref)
        except PublishError as error:
            for row in groups[ref]:
                row.error = str(error)
            return None

    widest = max(len(g) for g in groups.values())
    if widest * len(groups) > 2 * len(rows):
        # Very uneven groups would fill a shared batch with dummy rows: one batch each instead.
        for ref, group in groups.items():
            if (kv := found(ref)) is not None:
                _decode(model, [group], [kv], end_ids)
    else:
        prefixes = {ref: kv for ref in groups if (kv := found(ref)) is not None}
        if prefixes:
            _decode(model, [groups[r] for r in prefixes], list(prefixes.values()), end_ids)
    return [_completion(row) for row in rows]


def _completion(row: _Row) -> Completion:
    if row.error:
        return refused(row.request, row.error)
    return Completion(
        request_id=row.request.id,
        token_ids=tuple(row.tokens),
        logprobs=tuple(row.logprobs),
        versions=(row.request.prefix.version,) * len(row.tokens),
        finish_reason=row.reason,
        prompt_logprobs=row.prompt_logprobs,
    )


def _decode(
    model: PreTrainedModel,
    groups: list[list[_Row]],
    prefixes: list[Tensor],
    end_ids: frozenset[int],
) -> None:
    """Decode C groups of rows, each over its prefix, to the end; fills the rows in place."""
    per = max(len(g) for g in groups)
    # Row b = c * per + r belongs to prefix c; None fills groups that are shorter than the widest.
    slots: list[_Row | None] = [
        group[r] if r < len(group) else None for group in groups for r in range(per)
    ]
    kv, lengths = stack_prefixes(prefixes)
    starts = torch.tensor([p.shape[3] for p in prefixes]).repeat_interleave(per)
    longest = max(len(s.request.prompt_ids) for s in slots if s)
    budget = max(s.request.sampling.max_tokens for s in slots if s)
    ids = torch.zeros(len(slots), longest, dtype=torch.long)
    pad = torch.full((len(slots),), longest - 1)  # left padding of each row; dummies keep one token
    for b, slot in enumerate(slots):
        if slot:
            prompt = slot.request.prompt_ids
            pad[b] = longest - len(prompt)
            ids[b, pad[b] :] = torch.tensor(prompt)
    layers, heads, _ = kv_shape(model)
    context = PrefixContext(
        kv=kv,
        lengths=lengths,
        cache=DecodeCache.empty(kv, layers, len(slots), heads, longest + budget),
    )
    cache = context.cache
    assert cache is not None

    columns = torch.arange(longest)
    positions = (columns[None] - pad[:, None]).clamp(min=0) + starts[:, None]
    # A padding column sees itself alone, so that its softmax stays finite; nothing sees it.
    visible = (columns[None, :, None] >= columns[None, None, :]) & (
        columns[None, None, :] >= pad[:, None, None]
    )
    mask = visible | torch.eye(longest, dtype=torch.bool)
    read = hidden_states(model, ids, positions, mask[:, None], context)
    for b, slot in enumerate(slots):
        if slot and slot.request.prompt_logprobs:
            logprobs = model.lm_head(read[b, pad[b] : -1]).float().log_softmax(-1)
            slot.prompt_logprobs = tuple(
                logprobs.gather(-1, ids[b, pad[b] + 1 :, None])[:, 0].tolist()
            )
    hidden = read[:, -1]
    cache.used = longest
    position = positions[:, -1]
    while True:
        tokens = _sample(model.lm_head(hidden).float(), slots, end_ids)
        live = [b for b, s in enumerate(slots) if s and not s.reason]
        if not live:
            return
        keep = _compaction(slots, len(groups))
        if keep is not None:
            rows = torch.tensor(keep)
            slots = [slots[b] for b in keep]
            cache.keep_rows(rows)
            tokens, position, pad = tokens[rows], position[rows], pad[rows]
        position = position + 1
        columns = torch.arange(cache.used + 1)
        mask = columns[None] >= pad[:, None]
        hidden = hidden_states(
            model, tokens[:, None], position[:, None], mask[:, None, None], context
        )[:, -1]
        cache.used += 1


def _compaction(slots: list[_Row | None], groups: int) -> list[int] | None:
    """Which rows to keep once at most half of each group is still being decoded, else None.

    Every group keeps equally many rows, because rows find their prefix by position.
    """
    per = len(slots) // groups
    live = [
        [b for b in range(c * per, (c + 1) * per) if (s := slots[b]) and not s.reason]
        for c in range(groups)
    ]
    most = max(len(rows) for rows in live)
    if 2 * most > per:
        return None
    keep = []
    for c, rows in enumerate(live):
        spare = (b for b in range(c * per, (c + 1) * per) if b not in rows)
        keep += rows + [next(spare) for _ in range(most - len(rows))]
    return keep


def _sample(logits: Tensor, slots: list[_Row | None], end_ids: frozenset[int]) -> Tensor:
    """Draw the next token [B] of every live row from logits [B, V], and record it in the row."""
    logprobs = logits.log_softmax(-1)
    greedy = logits.argmax(-1)
    chosen = greedy.clone()
    by_sampling: dict[Sampling, list[tuple[int, _Row]]] = {}
    for b, slot in enumerate(slots):
        if slot and not slot.reason and slot.request.sampling.temperature > 0:
            by_sampling.setdefault(slot.request.sampling, []).append((b, slot))
    for sampling, drawing in by_sampling.items():
        rows = [b for b, _ in drawing]
        draws = torch.stack([slot.uniforms[len(slot.tokens)] for _, slot in drawing])
        chosen[rows] = draw(logits[rows], draws, sampling)
    picked = logprobs.gather(-1, chosen[:, None])[:, 0].tolist()
    ids = chosen.tolist()
    for b, slot in enumerate(slots):
        if slot is None or slot.reason:
            continue
        slot.tokens.append(ids[b])
        slot.logprobs.append(picked[b])
        if ids[b] in end_ids:
            slot.reason = "stop"
        elif len(slot.tokens) == slot.request.sampling.max_tokens:
            slot.reason = "length"
    return chosen


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Tensor:
    """Inverse-CDF draws [B] from logits [B, V] with one uniform in [0, 1) each.

    Truncation as usual in the field: top_k first, then the smallest set of mass >= top_p.
    """
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
    # Scaled by the last sum: rounding can never push a draw past the last possible token.
    found = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)
    return order.gather(-1, found.clamp(max=probs.shape[-1] - 1))[:, 0]


def uniforms(seed: int, count: int) -> Tensor:
    """A request's own stream [count] in [0, 1), float64: draw t decides its t-th token."""
    stream = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=stream, dtype=torch.float64)
