"""Compute the KV of documents, and cache it within a bound: each is read once, then reused.

KV that does not fit the device moves to host memory, where there is any beside the device, and
returns by a copy. For Llama-3.2-3B a document of 12,000 tokens is 1.4 GB: 30 ms over a link of 50
GB/s, against some 80 TFLOP to read it again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from learning.attention import FlatAttention
from learning.decoder import LanguageModel
from learning.model.kv_files import KVFiles
from protocols.errors import DataError
from protocols.types import SEPARATOR, CacheStats, require_ids

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
    done = torch.empty((layers, 2, heads, len(ids), size), dtype=model.dtype, device=model.device)
    none = torch.zeros(0, dtype=torch.long, device=model.device)
    for start in range(0, len(ids), PREFILL_CHUNK):
        of = slice(start, min(start + PREFILL_CHUNK, len(ids)))

        def keep(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, of: slice = of) -> None:
            done[layer, 0, :, of], done[layer, 1, :, of] = k.transpose(0, 1), v.transpose(0, 1)

        chunk = ids[of]
        attention = FlatAttention(
            [len(chunk)], [1], positions[of], [done[:, :, :, :start]], none, keep
        )
        model(chunk, positions[of], attention, none)
    return done


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
    first, *others = (documents[one] for one in names)
    return (*first, *(id for ids in others for id in ids[begin:]))


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
        self._held: OrderedDict[str, Tensor] = OrderedDict()
        self._spilled: OrderedDict[str, Tensor] = OrderedDict()
        self.hits = self.host_hits = self.misses = self.evictions = 0

    @property
    def held_bytes(self) -> int:
        """Return the bytes held on the device."""
        return sum(kv.nbytes for kv in self._held.values())

    @property
    def spilled_bytes(self) -> int:
        return sum(kv.nbytes for kv in self._spilled.values())

    @property
    def counts(self) -> CacheStats:
        return CacheStats(self.hits, self.host_hits, self.misses, self.evictions)

    def __contains__(self, name: str) -> bool:
        return name in self._documents

    def get(self, name: str) -> Tensor:
        """Return the KV of a document, or of several contexts (`context_ids`) read as one text, on
        the device; read it now if it is not cached. The least recently used make room for it. KV
        larger than the device's bound is returned but not kept there. Raises DataError for an
        unknown name, and for a token that the model does not have."""
        if name in self._held:
            self.hits += 1
            self._held.move_to_end(name)
            return self._held[name]
        ids = context_ids(self._documents, name)
        there = self._spilled.get(name)
        if there is not None and self._spill is not None:
            self.host_hits += 1
            kv = self._spill.back(there)
        else:
            self.misses += 1
            try:
                kv = self._read_once(ids)
            except DataError as error:
                raise DataError(f"document {name}: {error}") from error
        if kv.nbytes > self._max_bytes:
            if there is None:
                self._put_out(name, kv)
            else:
                self._spilled.move_to_end(name)
            return kv
        self._spilled.pop(name, None)
        self._held[name] = kv
        while self.held_bytes > self._max_bytes:
            self.evictions += 1
            self._put_out(*self._held.popitem(last=False))
        return kv

    def _read_once(self, ids: tuple[int, ...]) -> Tensor:
        """Return the KV from the files, or computed and kept in them."""
        if self._files is None:
            return self._read(ids)
        if (found := self._files.read(ids)) is not None:
            return found
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
