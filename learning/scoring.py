"""Scoring given response tokens under a document in context, without gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from learning.batching import pack, response_logits, stack_prefixes
from learning.prefixes import DocumentCache
from protocols.types import Sample


@torch.no_grad()
def score(
    model: PreTrainedModel, samples: Sequence[Sample], documents: DocumentCache, row_tokens: int
) -> Tensor:
    """Logits [N, V] (float32) of every response token with its sample's document as the prefix.

    Same order as `learning.batching.response_logits` gives for the student: sample by sample.
    """
    prefixes = {name: documents.get(name) for name in sorted({s.document for s in samples})}
    packed = pack(samples, {name: kv.shape[3] for name, kv in prefixes.items()}, row_tokens)
    kv, lengths = stack_prefixes([prefixes[name] for name in packed.names])
    return response_logits(model, packed, kv, lengths)
