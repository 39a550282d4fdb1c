"""Decode a whole batch of requests over shared prefixes, with seeded sampling per request.

This is the embedded backend of the `Generate` port: token ids in, token ids out. Each prefix is
held once for the batch; every token carries its log-probability and its prefix's version.
`learning.decoding.engine` decodes requests that arrive at any time, with the same decode batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from learning.decoding.decode_batch import DecodeBatch, DecodeState, new_row
from learning.decoding.stopping import Decode
from protocols.errors import PublishError
from protocols.types import Completion, GenerateRequest, PrefixRef

if TYPE_CHECKING:  # importing it takes seconds, which only code that loads a model should pay
    from transformers import PreTrainedModel

Lookup = Callable[[PrefixRef], Tensor]


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    requests: Sequence[GenerateRequest],
    lookup: Lookup,
    end_ids: frozenset[int],
    decode: Decode | None = None,
) -> list[Completion]:
    """Complete every request; return the completions in the order of the requests.

    `lookup` returns a prefix's keys and values [L, 2, H_kv, P, D], those of a composition already
    at their positions. If it raises PublishError, only the requests over that prefix are refused.
    `decode` returns the text of ids, for requests with `until`. Raises DataError for an empty
    prompt.
    """
    rows = [new_row(r, decode) for r in requests]
    groups: dict[PrefixRef, list[DecodeState]] = {}
    for row in rows:
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

    def decoded(prefixes: Sequence[Tensor], batch: Sequence[Sequence[DecodeState]]) -> None:
        lane = DecodeBatch(model, prefixes, batch, end_ids)
        while lane.live:
            lane.step()

    widest = max(len(g) for g in groups.values())
    if widest * len(groups) > 2 * len(rows):
        # Very uneven groups would fill a shared batch with dummy rows.
        for ref, group in groups.items():
            if (kv := found(ref)) is not None:
                decoded([kv], [group])
    else:
        prefixes = {ref: kv for ref in groups if (kv := found(ref)) is not None}
        if prefixes:
            decoded(list(prefixes.values()), [groups[r] for r in prefixes])
    return [row.completion() for row in rows]
