"""Compute a teacher's distributions: the KV of documents, and given tokens scored over prefixes.

The KV of a document is read once within a bound, then reused. KV that does not fit the device moves
to host memory, where there is any beside the device, and returns by a copy. For Llama-3.2-3B a
document of 12,000 tokens is 1.4 GB: 30 ms over a link of 50 GB/s, against some 80 TFLOP to read it
again. The processes of a host share it through files.

Given response tokens are scored without gradient. The document teacher reads a document's KV. The
hinted teacher, references and older versions of the student read a cartridge's. Results are in
sample order, response token by response token.

Dimensions: L layers, H_kv key/value heads, D numbers of a head, T tokens of a document, P of a
prefix, N response tokens, V the vocabulary, k entries of a teacher that tells its top k.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from cartridge_forge.learning.attention import FlatAttention
from cartridge_forge.learning.batch import (
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
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.ranks import concurrently, passes_beside
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import (
    SEPARATOR,
    CacheStats,
    PrecomputedScores,
    Sample,
    require_ids,
)

PREFILL_CHUNK = 512  # tokens: bounds the activations while a long document is read


def document_kv(model: LanguageModel, token_ids: list[int] | tuple[int, ...]) -> Tensor:
    """Return keys (post-RoPE) and values of a token sequence read from position 0:
    [L, 2, H_kv, T, D]. It is read in chunks, each attending to the chunks before it as a prefix.
    The heads of a divided base are gathered: all its ranks must call this. Raises DataError for an
    id that the model does not have."""
    kv = own_document_kv(model, token_ids)
    return kv if model.tensor is None else model.tensor.whole(kv, 2)


@torch.no_grad()
def own_document_kv(model: LanguageModel, token_ids: list[int] | tuple[int, ...]) -> Tensor:
    """Return `document_kv` by the heads alone that this rank of a divided base computes,
    [L, 2, own H_kv, T, D]."""
    require_ids(token_ids, model.vocabulary, "a document")
    ids = torch.tensor(list(token_ids), device=model.device)
    positions = torch.arange(len(ids), device=model.device)
    layers, heads, size = model.kv_shape
    if model.tensor is not None:
        heads //= model.tensor.size
    kv = torch.empty((layers, 2, heads, len(ids), size), dtype=model.dtype, device=model.device)
    none = torch.zeros(0, dtype=torch.long, device=model.device)
    for start in range(0, len(ids), PREFILL_CHUNK):
        span = slice(start, min(start + PREFILL_CHUNK, len(ids)))

        def keep(
            layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, span: slice = span
        ) -> None:
            kv[layer, 0, :, span], kv[layer, 1, :, span] = k.transpose(0, 1), v.transpose(0, 1)

        chunk = ids[span]
        attention = FlatAttention(
            [len(chunk)], [1], positions[span], [kv[:, :, :, :start]], none, keep
        )
        model(chunk, positions[span], attention, none)
    return kv


def context_ids(documents: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, ...]:
    """Return the token ids of a context, or of several whose names are joined by SEPARATOR, as one
    text: the tokens before any document, `documents["none"]`, begin it alone. The empty name has no
    token. Raises DataError for an unknown name."""
    if not name:
        return ()
    names = name.split(SEPARATOR)
    if unknown := [one for one in names if one not in documents]:
        raise DataError(f"no document {unknown[0]!r}; this run has {sorted(documents)}")
    begin = len(documents.get("none", ()))
    first, *later = (documents[one] for one in names)
    return (*first, *(id for ids in later for id in ids[begin:]))


@dataclass(frozen=True)
class HostCache:
    """Describe a second cache of `max_bytes`: `out` copies a document's KV to it, `back` to the
    device. Both return a tensor equal to their input, which may share no memory with it."""

    max_bytes: int
    out: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


def host_spill(device: torch.device, max_bytes: int) -> HostCache | None:
    """Return a cache in page-locked host memory beside `device`. Return None on a CPU, whose own
    memory that is, so that the first bound is the only one."""
    if device.type == "cpu":
        return None
    pinned = device.type == "cuda"

    def out(kv: Tensor) -> Tensor:
        return torch.empty(kv.shape, dtype=kv.dtype, pin_memory=pinned).copy_(kv)

    # torch reuses page-locked memory only after the copies from it have ended.
    return HostCache(max_bytes, out, lambda kv: kv.to(device, non_blocking=pinned))


class DocumentKVCache:
    """Hold document KV [L, 2, H_kv, T, D] in a least-recently-used cache, bounded in bytes.

    `read` computes the KV of a token sequence on the device (`document_kv`
    bound to a model), unless `files`, which other processes share, have it. A document is held on
    the device or in `spill`, never in both. `counts` are those since the start.
    """

    def __init__(
        self,
        read: Callable[[tuple[int, ...]], Tensor],
        documents: Mapping[str, tuple[int, ...]],
        max_bytes: int,
        spill: HostCache | None = None,
        files: KVFiles | None = None,
    ) -> None:
        self._read = read
        self._documents = dict(documents)
        self._max_bytes = max_bytes
        self._spill = spill
        self._files = files
        self._cached: OrderedDict[str, Tensor] = OrderedDict()
        self._spilled: OrderedDict[str, Tensor] = OrderedDict()
        self.hits = self.host_hits = self.misses = self.evictions = 0

    @property
    def held_bytes(self) -> int:
        """Return the bytes held on the device."""
        return sum(kv.nbytes for kv in self._cached.values())

    @property
    def spilled_bytes(self) -> int:
        return sum(kv.nbytes for kv in self._spilled.values())

    @property
    def counts(self) -> CacheStats:
        return CacheStats(self.hits, self.host_hits, self.misses, self.evictions)

    def __contains__(self, name: str) -> bool:
        return name in self._documents

    def add(self, name: str, ids: tuple[int, ...]) -> None:
        """Have `get` read a further document."""
        self._documents[name] = ids

    def get(self, name: str) -> Tensor:
        """Return the KV of a document, or of several contexts (`context_ids`) read as one text, on
        the device; read it now if it is not cached. The least recently used make room for it. KV
        larger than the device's bound is returned but not kept there. Raises DataError for an
        unknown name, and for a token that the model does not have."""
        if name in self._cached:
            self.hits += 1
            self._cached.move_to_end(name)
            return self._cached[name]
        ids = context_ids(self._documents, name)
        spilled = self._spilled.get(name)
        if spilled is not None and self._spill is not None:
            self.host_hits += 1
            kv = self._spill.back(spilled)
        else:
            self.misses += 1
            try:
                kv = self._read_once(ids)
            except DataError as error:
                raise DataError(f"document {name}: {error}") from error
        if kv.nbytes > self._max_bytes:
            if spilled is None:
                self._put_out(name, kv)
            else:
                self._spilled.move_to_end(name)
            return kv
        self._spilled.pop(name, None)
        self._cached[name] = kv
        while self.held_bytes > self._max_bytes:
            self.evictions += 1
            self._put_out(*self._cached.popitem(last=False))
        return kv

    def _read_once(self, ids: tuple[int, ...]) -> Tensor:
        """Return the KV from the files, or computed and kept in them."""
        if self._files is None:
            return self._read(ids)
        if (stored := self._files.read(ids)) is not None:
            return stored
        kv = self._read(ids)
        self._files.keep(ids, kv)
        return kv

    def _put_out(self, name: str, kv: Tensor) -> None:
        """Keep KV that the device does not hold, as far as the host cache has room."""
        spill = self._spill
        if spill is None or kv.nbytes > spill.max_bytes:
            return
        while self.spilled_bytes + kv.nbytes > spill.max_bytes:
            self._spilled.popitem(last=False)
        self._spilled[name] = spill.out(kv)


TIMES_FREE = 8  # the disk has this many times the bytes of all files free, or none is added


class KVFiles:
    """Keep the KV of one model, in its type, in `directory`, which one run has for itself."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, ids: Sequence[int]) -> Tensor | None:
        """Return the KV [L, 2, H_kv, T, D] of a document's tokens, mapped from its file; None where
        there is none that can be read."""
        try:
            return load_file(self._file(ids))["kv"]
        except (OSError, SafetensorError, KeyError):
            return None

    def keep(self, ids: Sequence[int], kv: Tensor) -> None:
        """Write a document's KV, unless all files would take a large part of the disk's free room,
        or that fails: nobody depends on it."""
        file = self._file(ids)
        partial = file.with_suffix(f".{os.getpid()}")
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            stored_bytes = sum(one.stat().st_size for one in self._directory.iterdir())
            if shutil.disk_usage(self._directory).free < TIMES_FREE * (stored_bytes + kv.nbytes):
                return
            save_file({"kv": kv.contiguous()}, partial)
            partial.replace(file)
        except (OSError, SafetensorError):
            with contextlib.suppress(OSError):
                partial.unlink()

    def _file(self, ids: Sequence[int]) -> Path:
        digest = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
        return self._directory / f"{digest[:32]}.safetensors"


LOGIT_BYTES = 256 * 2**20  # of a teacher of which a few numbers a token are kept


def score(
    model: LanguageModel, samples: Sequence[Sample], documents: DocumentKVCache, row_tokens: int
) -> Tensor:
    """Return logits [N, V] (float32) of every response token with its sample's context as the
    prefix. The order is that of `learning.batch.response_logits` for the student: sample by
    sample."""
    return score_over(model, samples, contexts_of(samples, documents), row_tokens, context_of)


def contexts_of(samples: Sequence[Sample], documents: DocumentKVCache) -> dict[str, Tensor]:
    """Return the KV [L, 2, H_kv, T, D] of every context that the samples name
    (`learning.batch.context_of`)."""
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
    student_top: int = 0,
    prefix: Callable[[Sample], str] = cartridge_of,
) -> dict[str, Tensor]:
    """Return the tensors to store of `score_over`'s logits: the top entries of each token, or all
    for None. `TeacherDistribution(**score_kept(...))` reads them. For top
    entries at most LOGIT_BYTES of logits exist at a time. With `keep_sampled` the response tokens'
    own log-probabilities are kept too, which may lie outside the top entries. With `student_top`
    that many further entries of each token are kept, the student's likeliest among them
    (`Sample.likely`). On a CPU parts of the samples are scored beside each other
    (`learning.ranks`)."""
    lengths = [tokens_of(s) for s in samples]
    passes = passes_beside(model, sum(lengths))

    def run(part: Sequence[int]) -> TeacherDistribution:
        chosen, most = [samples[i] for i in part], LOGIT_BYTES // passes
        if keep_top is None:
            return TeacherDistribution(score_over(model, chosen, prefixes, row_tokens, prefix))
        tokens = _scored(model, chosen, prefixes, row_tokens, most, prefix)
        likely = likely_of(chosen, student_top) if student_top else None  # [n, k]

        def reduced(logits: Tensor, span: slice) -> tuple[Tensor, ...]:
            sampled = (token_logprobs(logits, tokens.targets[span]),) if keep_sampled else ()
            if likely is None:
                return *top_k(logits, keep_top), *sampled
            return *top_k_with(logits, keep_top, likely[span]), *sampled

        return TeacherDistribution(None, *tokens.read(slice(None), reduced))

    parts = even_parts(lengths, [prefix(s) for s in samples], passes)
    distribution = joined(
        [*zip(parts, concurrently(run, parts, passes), strict=True)],
        [len(s.response_ids) for s in samples],
    )
    return {name: value for name, value in vars(distribution).items() if value is not None}


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
    top = F.log_softmax(logits.float(), dim=-1).topk(min(k, logits.shape[-1]), dim=-1)
    return top.indices.int(), top.values


NO_TOKEN = -1  # in the place of an id, where a text comes without the student's likeliest tokens


def likely_of(samples: Sequence[Sample], count: int) -> Tensor:
    """Return the student's likeliest tokens at each response token, [N, count]; NO_TOKEN for those
    that are not known, as in text that the student did not write. Raises DataError for a sample
    that has them at some of its tokens alone."""
    rows: list[tuple[int, ...]] = []
    for s in samples:
        if s.likely and len(s.likely) != len(s.response_ids):
            raise DataError(
                f"sample {s.id} has {len(s.response_ids)} tokens and the student's likeliest at "
                f"{len(s.likely)} of them; give them at each, or none"
            )
        rows += s.likely or ((),) * len(s.response_ids)
    padded = [(*row[:count], *(NO_TOKEN,) * (count - len(row))) for row in rows]
    return torch.tensor(padded, dtype=torch.long).view(len(rows), count)


def top_k_with(logits: Tensor, k: int, likely: Tensor) -> tuple[Tensor, Tensor]:
    """Return `top_k` of a union: of k + j different tokens, those of `likely` [N, j] and else the
    most likely by the logits [N, V], so that their top k are among them. NO_TOKEN in `likely`
    leaves its place to these. All tokens for a vocabulary that is smaller."""
    logprobs = F.log_softmax(logits.float(), dim=-1)
    vocabulary = logprobs.shape[-1]
    marks = torch.zeros(len(logprobs), vocabulary + 1, dtype=torch.bool, device=logprobs.device)
    at = likely.to(logprobs.device)
    marks.scatter_(-1, torch.where(at == NO_TOKEN, vocabulary, at), True)
    ranked = logprobs.masked_fill(marks[:, :vocabulary], math.inf)
    indices = ranked.topk(min(k + likely.shape[-1], vocabulary), dim=-1).indices
    values = logprobs.gather(-1, indices)
    order = values.argsort(dim=-1, descending=True, stable=True)
    return indices.gather(-1, order).int(), values.gather(-1, order)


@dataclass(frozen=True)
class TeacherDistribution:
    """Hold the teacher's distribution at N response tokens: `logits` [N, V], or its top k
    (`indices`, `logprobs` [N, k], log-probabilities under the whole vocabulary), those of a union
    with the student's where it tells these. `sampled` [N] is the response token's own, where it was
    asked for."""

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
        return self._map(lambda x: x[which])

    def to(self, device: torch.device) -> TeacherDistribution:
        """Return a copy on the student's device. Scores arrive from the tensor plane on the host
        and are moved to the device a chunk of tokens at a time."""
        return self._map(lambda x: x.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> TeacherDistribution:
        tensors = (self.logits, self.indices, self.logprobs, self.sampled)
        return TeacherDistribution(*(None if x is None else change(x) for x in tensors))


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
