"""A bounded cache of frozen document KV: each document is read once, then reused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from torch import Tensor

from protocols.errors import DataError


class DocumentCache:
    """Least-recently-used cache of document KV [L, 2, H_kv, T, D], bounded in bytes.

    `read` computes the KV of a token sequence (`learning.model.document_kv` bound to a model).
    `hits` and `misses` count look-ups since the start.
    """

    def __init__(
        self,
        read: Callable[[tuple[int, ...]], Tensor],
        documents: Mapping[str, tuple[int, ...]],
        max_bytes: int,
    ) -> None:
        self._read = read
        self._documents = dict(documents)
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, Tensor] = OrderedDict()
        self.hits = 0
        self.misses = 0

    @property
    def held_bytes(self) -> int:
        return sum(kv.nbytes for kv in self._held.values())

    def __contains__(self, name: str) -> bool:
        return name in self._documents

    def get(self, name: str) -> Tensor:
        """The document's KV; read now if it is not held, dropping the least recently used.

        A document larger than the bound is served but not kept. Raises DataError for an unknown
        name.
        """
        if name in self._held:
            self.hits += 1
            self._held.move_to_end(name)
            return self._held[name]
        if name not in self._documents:
            raise DataError(f"no document {name!r}; this run has {sorted(self._documents)}")
        self.misses += 1
        kv = self._read(self._documents[name])
        if kv.nbytes <= self._max_bytes:
            self._held[name] = kv
            while self.held_bytes > self._max_bytes:
                self._held.popitem(last=False)
        return kv
