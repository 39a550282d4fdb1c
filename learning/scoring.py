"""Score given response tokens over given prefixes, without gradient: a teacher's distributions.

The document teacher reads a document's KV. The hinted teacher, references and older versions of the
student read a cartridge's. Results are in sample order, response token by response token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from learning.decoder import LanguageModel
from learning.model.document_kv import DocumentKVCache
from learning.packing import (
    ChunkedLogits,
    cartridge_of,
    check_ids,
    context_of,
    even_parts,
    pack,
    response_tokens,
    token_logprobs,
    tokens_of,
)
from learning.ranks import beside, passes_beside
from protocols.train_batch import PrecomputedScores
from protocols.types import Sample

LOGIT_BYTES = 256 * 2**20  # of a teacher of which a few numbers a token are kept


def score(
    model: LanguageModel, samples: Sequence[Sample], documents: DocumentKVCache, row_tokens: int
) -> Tensor:
    """Return logits [N, V] (float32) of every response token with its sample's context as the
    prefix. The order is that of `learning.packing.response_logits` for the student: sample by
    sample."""
    return score_over(model, samples, contexts_of(samples, documents), row_tokens, context_of)


def contexts_of(samples: Sequence[Sample], documents: DocumentKVCache) -> dict[str, Tensor]:
    """Return the KV [L, 2, H_kv, T, D] of every context that the samples name
    (`learning.packing.context_of`)."""
    return {name: documents.get(name) for name in sorted(set(map(context_of, samples)))}


@torch.no_grad()
def score_over(
    model: LanguageModel,
    samples: Sequence[Sample],
    prefixes: Mapping[str, Tensor],
    row_tokens: int,
    prefix: Callable[[Sample], str] = cartridge_of,
) -> Tensor:
    """Return logits [N, V] (float32) with `prefixes[prefix(sample)]` [L, 2, H_kv, P, D] before each
    sample."""
    return _scored(model, samples, prefixes, row_tokens, None, prefix).logits


@torch.no_grad()
def score_kept(
    model: LanguageModel,
    samples: Sequence[Sample],
    prefixes: Mapping[str, Tensor],
    row_tokens: int,
    keep_top: int | None,
    *,
    keep_sampled: bool = False,
    prefix: Callable[[Sample], str] = cartridge_of,
) -> dict[str, Tensor]:
    """Return the tensors to store of `score_over`'s logits: the top entries of each token, or all
    for None. `TeacherDistribution(**score_kept(...))` reads them. For top
    entries at most LOGIT_BYTES of logits exist at a time. With `keep_sampled` the response tokens'
    own log-probabilities are kept too, which may lie outside the top entries. On a CPU parts of the
    samples are scored beside each other (`learning.ranks`)."""
    lengths = [tokens_of(s) for s in samples]
    passes = passes_beside(model, sum(lengths))

    def run(part: Sequence[int]) -> TeacherDistribution:
        chosen, most = [samples[i] for i in part], LOGIT_BYTES // passes
        if keep_top is None:
            return TeacherDistribution(score_over(model, chosen, prefixes, row_tokens, prefix))
        tokens = _scored(model, chosen, prefixes, row_tokens, most, prefix)

        def kept(logits: Tensor, of: slice) -> tuple[Tensor, ...]:
            own = (token_logprobs(logits, tokens.targets[of]),) if keep_sampled else ()
            return *top_k(logits, keep_top), *own

        return TeacherDistribution(None, *tokens.read(slice(None), kept))

    parts = even_parts(lengths, [prefix(s) for s in samples], passes)
    found = joined(
        [*zip(parts, beside(run, parts, passes), strict=True)],
        [len(s.response_ids) for s in samples],
    )
    return {name: value for name, value in vars(found).items() if value is not None}


@torch.no_grad()
def response_logprobs(
    model: LanguageModel,
    samples: Sequence[Sample],
    prefixes: Mapping[str, Tensor],
    row_tokens: int,
) -> Tensor:
    """Return the log-probability [N] of every response token: for a reference, a distilling
    teacher, or the student under the version that sampled it."""
    tokens = _scored(model, samples, prefixes, row_tokens, LOGIT_BYTES, cartridge_of)
    return tokens.logprobs(slice(0, len(tokens.targets)))


def _scored(
    model: LanguageModel,
    samples: Sequence[Sample],
    prefixes: Mapping[str, Tensor],
    row_tokens: int,
    logit_bytes: int | None,
    prefix: Callable[[Sample], str],
) -> ChunkedLogits:
    """Return the response tokens' logits, to be read in chunks."""
    lengths_of = {name: kv.shape[3] for name, kv in prefixes.items()}
    check_ids(samples, model)
    packed = pack(samples, lengths_of, row_tokens, prefix)
    read = [prefixes[name] for name in packed.names]
    return response_tokens(model, packed, read, logit_bytes=logit_bytes)


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k most likely tokens and their log-probabilities: ([N, k] int32, [N, k]
    float32)."""
    found = F.log_softmax(logits.float(), dim=-1).topk(min(k, logits.shape[-1]), dim=-1)
    return found.indices.int(), found.values


@dataclass(frozen=True)
class TeacherDistribution:
    """Hold the teacher's distribution at N response tokens: `logits` [N, V], or its top k
    (`indices`, `logprobs` [N, k], log-probabilities under the whole vocabulary). `sampled` [N] is
    the response token's own, where it was asked for."""

    logits: Tensor | None = None
    indices: Tensor | None = None
    logprobs: Tensor | None = None
    sampled: Tensor | None = None

    @property
    def tokens(self) -> int:
        one = self.logits if self.logits is not None else self.logprobs
        assert one is not None
        return len(one)

    def rows(self, which: slice | Tensor) -> TeacherDistribution:
        """Return the distribution at some of the tokens: a slice, or indices [n]."""
        return self._each(lambda x: x[which])

    def to(self, device: torch.device) -> TeacherDistribution:
        """Return a copy on the student's device. Scores arrive from the tensor plane on the host
        and are moved to the device a chunk of tokens at a time."""
        return self._each(lambda x: x.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> TeacherDistribution:
        held = (self.logits, self.indices, self.logprobs, self.sampled)
        return TeacherDistribution(*(None if x is None else change(x) for x in held))


def of_stored(stored: PrecomputedScores) -> TeacherDistribution:
    """Return the distribution that was stored when a sample's text was written."""
    indices = torch.tensor(stored.ids, dtype=torch.int32)
    return TeacherDistribution(indices=indices, logprobs=torch.tensor(stored.logprobs))


def joined(
    parts: Sequence[tuple[Sequence[int], TeacherDistribution]], lengths: Sequence[int]
) -> TeacherDistribution:
    """Return one distribution over all samples' tokens, in sample order, from parts over some of
    them. `lengths[i]` is the number of tokens of sample i. A part is the indices of its samples, in
    the order of its teacher's rows: ((0, 2), T1), ((1,), T2)."""
    if len(parts) == 1 and tuple(parts[0][0]) == tuple(range(len(lengths))):
        return parts[0][1]
    order = [i for samples, _ in parts for i in samples]
    assert sorted(order) == list(range(len(lengths))), "a sample is scored once"
    begins = dict(zip(order, accumulate((lengths[i] for i in order), initial=0), strict=False))
    rows = torch.tensor(
        [begins[i] + t for i, length in enumerate(lengths) for t in range(length)], dtype=torch.long
    )
    columns = zip(*((t.logits, t.indices, t.logprobs, t.sampled) for _, t in parts), strict=True)
    return TeacherDistribution(
        *(None if x[0] is None else torch.cat(x)[rows.to(x[0].device)] for x in columns)
    )
