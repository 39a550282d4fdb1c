"""Score given response tokens over given prefixes, without gradient.

The document teacher reads a document's KV. The hinted teacher, references and older versions of the
student read a cartridge's. Results are in sample order, response token by response token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from learning.losses.dpo import is_stale, summed_by_pair
from learning.model.chunked_logits import ChunkedLogits
from learning.model.document_kv import DocumentKVCache
from learning.packing import pack, response_tokens, stack_prefixes
from learning.teacher_logprobs import top_k
from protocols.train_batch import PreferencePair, completions
from protocols.types import Sample

if TYPE_CHECKING:  # importing it takes seconds, which only code that loads a model should pay
    from transformers import PreTrainedModel

LOGIT_BYTES = 256 * 2**20  # of a teacher of which a few numbers a token are kept


def score(
    model: PreTrainedModel, samples: Sequence[Sample], documents: DocumentKVCache, row_tokens: int
) -> Tensor:
    """Return logits [N, V] (float32) of every response token with its sample's document as the
    prefix. The order is that of `learning.packing.response_logits` for the student: sample by
    sample."""
    return score_over(model, samples, prefixes_of(samples, documents), row_tokens)


def prefixes_of(samples: Sequence[Sample], documents: DocumentKVCache) -> dict[str, Tensor]:
    """Return the KV [L, 2, H_kv, T, D] of every document that the samples name."""
    return {name: documents.get(name) for name in sorted({s.document for s in samples})}


@torch.no_grad()
def score_over(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    prefixes: Mapping[str, Tensor],
    row_tokens: int,
) -> Tensor:
    """Return logits [N, V] (float32) with `prefixes[document]` [L, 2, H_kv, P, D] before each
    sample."""
    return _scored(model, samples, prefixes, row_tokens, None).logits


@torch.no_grad()
def score_kept(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    prefixes: Mapping[str, Tensor],
    row_tokens: int,
    keep_top: int | None,
) -> dict[str, Tensor]:
    """Return the tensors to store of `score_over`'s logits: the top entries of each token, or all
    for None. `learning.teacher_logprobs.TeacherDistribution(**score_kept(...))` reads them. For top
    entries at most LOGIT_BYTES of logits exist at a time."""
    if keep_top is None:
        return {"logits": score_over(model, samples, prefixes, row_tokens)}
    tokens = _scored(model, samples, prefixes, row_tokens, LOGIT_BYTES)
    indices, logprobs = tokens.read(slice(None), lambda logits, of: top_k(logits, keep_top))
    return {"indices": indices, "logprobs": logprobs}


@torch.no_grad()
def response_logprobs(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    prefixes: Mapping[str, Tensor],
    row_tokens: int,
) -> Tensor:
    """Return the log-probability [N] of every response token: for a reference, a distilling
    teacher, or the student under the version that sampled it."""
    tokens = _scored(model, samples, prefixes, row_tokens, LOGIT_BYTES)
    return tokens.logprobs(slice(0, len(tokens.targets)))


def with_references(
    model: PreTrainedModel,
    pairs: Sequence[PreferencePair],
    prefixes: Mapping[str, Tensor],
    row_tokens: int,
    version: int,
    max_age: int | None,
) -> list[PreferencePair]:
    """Return the pairs in their order. A stale reference is computed anew under `version`, whose
    cartridges are `prefixes`."""
    stale = [p for p in pairs if is_stale(p, version, max_age)]
    if not stale:
        return list(pairs)
    logprobs = response_logprobs(model, completions(stale), prefixes, row_tokens)
    chosen, rejected = summed_by_pair(logprobs, stale)
    fresh = iter(
        [
            replace(p, ref_chosen=c, ref_rejected=r, ref_version=version)
            for p, c, r in zip(stale, chosen.tolist(), rejected.tolist(), strict=True)
        ]
    )
    return [next(fresh) if is_stale(p, version, max_age) else p for p in pairs]


def _scored(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    prefixes: Mapping[str, Tensor],
    row_tokens: int,
    logit_bytes: int | None,
) -> ChunkedLogits:
    """Return the response tokens' logits, to be read in chunks."""
    packed = pack(samples, {name: kv.shape[3] for name, kv in prefixes.items()}, row_tokens)
    kv, lengths = stack_prefixes([prefixes[name] for name in packed.names])
    return response_tokens(model, packed, kv, lengths, logit_bytes=logit_bytes)
