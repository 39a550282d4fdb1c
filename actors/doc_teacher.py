"""DocTeacherActor: the same frozen model with the document in context, scoring given tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial

import torch
from monarch.actor import Actor, endpoint

from actors.setup import BaseModel, fresh_key
from learning.model import document_kv, flush_denormals
from learning.prefixes import DocumentCache, host_spill
from learning.scoring import prefixes_of, score_kept
from protocols.ports import TensorPlane
from protocols.types import Sample, Scored


class DocTeacherActor(Actor):
    """Scores exactly the sampled tokens: all of a call's in one pass, those of one document over
    one prefix. A document's KV is read once and reused (bounded LRU, then host memory)."""

    def __init__(self, base: BaseModel, row_tokens: int, keep_top: int | None) -> None:
        """`keep_top` entries a token are sent, or all logits for None."""
        torch.set_num_threads(base.threads)
        flush_denormals()
        self._model = base.load()
        self._plane = base.plane
        self._row_tokens = row_tokens
        self._keep_top = keep_top
        self._documents = DocumentCache(
            partial(document_kv, self._model),
            base.documents,
            base.max_kv_bytes,
            host_spill(self._model.device, base.host_kv_bytes),
        )

    @endpoint
    async def ready(self) -> int:
        """This process's id, once the model is loaded."""
        return os.getpid()

    @endpoint
    async def use_plane(self, plane: TensorPlane) -> None:
        """Tensors pass over this plane from now on: the one before was lost."""
        self._plane = plane

    @endpoint
    async def score(self, stem: str, samples: Sequence[Sample]) -> Scored:
        """Put the teacher's distributions over every response token under a key of this stem."""
        begun, before = time.perf_counter(), self._documents.counts
        prefixes = prefixes_of(samples, self._documents)
        tensors = score_kept(self._model, samples, prefixes, self._row_tokens, self._keep_top)
        seconds = time.perf_counter() - begun
        packet = await self._plane.put(fresh_key(stem), tensors)
        looked_up = self._documents.counts.since(before)
        return Scored(seconds, packet, len(next(iter(tensors.values()))), looked_up)
