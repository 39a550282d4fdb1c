"""Compute a transformers model's logits at response tokens, in the order of `learning.batch`.

TRL pads prompts on the left. Over a cartridge that moves a prompt: the cartridge's keys are rotated
for positions 0..P-1, a model that is given no positions counts the padding, and the prompt then
begins at P + padding instead of at P. Rows are therefore laid out here from the left and padded on
the right, where no token that is read sees the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

Ids = Sequence[int]
PADDING = 0  # any id: what is written there is never read


def unpadded(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """Return the tokens of each row of ids [B, T] that `mask` [B, T] marks, on either side."""
    return [row[mask_row.bool()].tolist() for row, mask_row in zip(ids, mask, strict=True)]


def response_logits(model: Any, contexts: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
    """Return logits [N, V] in float32 that predict each response token, row by row, with gradient.

    `model` is a causal LM of transformers, or one with a prefix of PEFT, which keeps the input's
    positions behind the prefix. A row is a context and its response, both of a token at least.
    """
    rows = [[*context, *response] for context, response in zip(contexts, responses, strict=True)]
    ids, mask = _right_padded(rows, model.device)
    first = min(map(len, contexts)) - 1
    read = torch.arange(first, ids.shape[1] - 1, device=ids.device)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=read).logits
    return _of_responses(logits, [len(c) - 1 - first for c in contexts], responses)


@torch.no_grad()
def teacher_logits(
    model: Any, contexts: Sequence[Ids], responses: Sequence[Ids], *, cartridge: bool
) -> Tensor:
    """Return `response_logits` without gradient, with the cartridge of a PEFT model or of its base
    alone. Each different context is read once, whatever number of responses follow it."""
    parts: list[Tensor] = [torch.empty(0)] * len(responses)
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, context in enumerate(contexts):
        groups.setdefault(tuple(context), []).append(i)
    with nullcontext() if cartridge else model.disable_adapter():
        for context, members in groups.items():
            answers = [responses[i] for i in members]
            if cartridge or len(context) == 1:  # PEFT fills the cache itself
                logits = response_logits(model, [context] * len(answers), answers)
            else:
                logits = _continued(model, context, answers)
            for i, part in zip(members, logits.split([len(r) for r in answers]), strict=True):
                parts[i] = part
    return torch.cat(parts)


def _continued(model: Any, context: Ids, responses: Sequence[Ids]) -> Tensor:
    """Return the logits [N, V] of the responses of one context, which is read once."""
    *head_ids, last = context
    head = torch.tensor([head_ids], device=model.device)
    cache = model(input_ids=head, use_cache=True, logits_to_keep=1).past_key_values
    cache.batch_repeat_interleave(len(responses))
    ids, mask = _right_padded([[last, *response] for response in responses], model.device)
    attention_mask = torch.cat([mask.new_ones(len(responses), len(head_ids)), mask], dim=1)
    logits = model(input_ids=ids, attention_mask=attention_mask, past_key_values=cache).logits
    return _of_responses(logits, [0] * len(responses), responses)


def _right_padded(rows: Sequence[Ids], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids and mask [B, T]."""
    longest = max(map(len, rows))
    ids = [[*row, *[PADDING] * (longest - len(row))] for row in rows]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _of_responses(logits: Tensor, starts: Sequence[int], responses: Sequence[Ids]) -> Tensor:
    """Return of logits [B, T, V] those that predict each row's response, which its `starts` begin
    with, one behind the other: [N, V]."""
    parts = [
        row[start : start + len(response)]
        for row, start, response in zip(logits, starts, responses, strict=True)
    ]
    return torch.cat(parts).float()
