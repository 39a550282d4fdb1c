"""Fingerprint cartridges: a SHA-256 of the shape, dtype and bytes of the numbers in use.

The trainer fingerprints each version that it publishes. A generator fingerprints the tensor that a
request is decoded over, not the label that it was loaded under, and reports it with the response.
Equal fingerprints prove that the right numbers lay before the decoder. They do not prove that the
decoder used them: that is shown by its log-probabilities (`learning.sampler_gap`). The name is not
part of a fingerprint, so that one cartridge that is served under another's name is recognised.

A fingerprint is made of one digest for each key/value head. Processes that hold some heads each
compute it together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from learning.ranks import each, to_host
from protocols.types import CARTRIDGE, PrefixRef


def fingerprint(kv: Tensor) -> str:
    """Return the fingerprint of a cartridge [L, 2, H_kv, P, D], in hexadecimal."""
    return joined_fingerprint(kv.shape, kv.dtype, head_digests(kv))


def head_digests(kv: Tensor) -> list[str]:
    """Return the SHA-256 of the bytes of each head of kv [L, 2, H_kv, P, D], in hexadecimal."""
    heads = kv.detach().movedim(2, 0)
    if kv.device.type == "cuda":
        heads = to_host(heads.contiguous())
    return each(_digest, heads.cpu(), kv.nbytes)


def _digest(head: Tensor) -> str:
    return hashlib.sha256(head.contiguous().view(torch.uint8).numpy().data).hexdigest()


def joined_fingerprint(shape: Sequence[int], dtype: torch.dtype, heads: Sequence[str]) -> str:
    """Return the fingerprint of a whole cartridge of `shape` [L, 2, H_kv, P, D] from the digests of
    its heads, in order."""
    header = [list(shape), str(dtype).removeprefix("torch."), list(heads)]
    return hashlib.sha256(json.dumps(header).encode()).hexdigest()


class Fingerprints:
    """Compute the digests of tensors in use, each once as long as its numbers do not change.

    What is known belongs to a tensor in memory and to torch's count of the writes to it. Another
    tensor at the same address, or a write in place, is therefore computed anew. A write that torch
    does not count (to memory shared with another process) is not noticed.
    """

    def __init__(self) -> None:
        self._known: MutableMapping[Tensor, dict[Any, list[str]]] = WeakTensorKeyDictionary()

    def heads(self, kv: Tensor) -> list[str]:
        """Return `head_digests` of kv [L, 2, H_kv, P, D], often a view of a larger tensor."""
        owner: Tensor = kv if kv._base is None else kv._base
        if owner.is_inference():  # torch does not count the writes to it
            return head_digests(kv)
        known = self._known.setdefault(owner, {})
        # The count is of the tensor that owns the memory.
        place = (kv._version, kv.storage_offset(), tuple(kv.shape), kv.stride())
        if place not in known:
            for old in [p for p in known if p[0] != kv._version]:
                del known[old]
            known[place] = head_digests(kv)
        return list(known[place])

    def of(self, kv: Tensor) -> str:
        """Return the fingerprint of a cartridge [L, 2, H_kv, P, D]."""
        return joined_fingerprint(kv.shape, kv.dtype, self.heads(kv))

    def served(
        self, ref: PrefixRef, kv: Tensor, single: Callable[[PrefixRef], Tensor]
    ) -> tuple[str, ...]:
        """Return the fingerprint of each part of a prefix, "" for a document's own KV. `kv` is the
        prefix in use; the parts of a composition, whose keys are moved, are those of `single`."""
        parts = ref.parts
        return tuple(
            self.of(kv if len(parts) == 1 else single(part))
            if part.name.startswith(CARTRIDGE)
            else ""
            for part in parts
        )
