"""Score given tokens with the frozen base model that has the document in context."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from monarch.actor import endpoint

from actors.base import ModelSource, fresh_key
from actors.model_actor import ModelActor
from learning.model.document_kv import DocumentKVCache, host_spill
from learning.model.loading import document_kv
from learning.scoring import prefixes_of, score_kept
from protocols.types import Sample, ScoreOutput


class DocTeacherActor(ModelActor):
    """Score the sampled tokens of a call in one pass, samples of one document over one prefix. A
    document's KV is computed once and reused (bounded LRU, then host memory)."""

    def __init__(self, base: ModelSource, row_tokens: int, keep_top: int | None) -> None:
        """Send `keep_top` entries a token, or all logits for None."""
        super().__init__(base)
        self._row_tokens = row_tokens
        self._keep_top = keep_top
        self._documents = DocumentKVCache(
            partial(document_kv, self._model),
            base.documents,
            base.max_kv_bytes,
            host_spill(self._model.device, base.host_kv_bytes),
        )

    @endpoint
    async def score(self, stem: str, samples: Sequence[Sample]) -> ScoreOutput:
        """Put the teacher's distributions over every response token under a key of this stem."""
        begun, before = time.perf_counter(), self._documents.counts
        prefixes = prefixes_of(samples, self._documents)
        tensors = score_kept(self._model, samples, prefixes, self._row_tokens, self._keep_top)
        seconds = time.perf_counter() - begun
        packet = await self._plane.put(fresh_key(stem), tensors)
        looked_up = self._documents.counts.since(before)
        return ScoreOutput(seconds, packet, len(next(iter(tensors.values()))), looked_up)
