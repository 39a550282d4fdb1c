"""Sample whole batches over cartridge versions and documents (embedded torch).

`actors.engine_generator` serves requests that arrive and end at any time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from monarch.actor import endpoint
from torch import Tensor

from actors.base import ModelSource
from actors.model_actor import CartridgeReaderActor
from learning.decoding.generate import generate
from learning.model.document_kv import DocumentKVCache
from learning.model.loading import document_kv, text_of
from learning.model.rope import composed
from protocols.types import GenerateOutput, GenerateRequest, PrefixRef


class GeneratorActor(CartridgeReaderActor):
    """Run one replica of the `Generate` port. Holds the last few published versions.

    Prefix names: "cartridge/<document>" for a published version, "document/<document>" for a
    document's own KV. A request may name an ordered composition of them.
    """

    def __init__(self, base: ModelSource, end_ids: frozenset[int], keep_versions: int) -> None:
        super().__init__(base, keep_versions)
        self._end_ids = end_ids
        self._text = text_of(base.path)
        self._documents = DocumentKVCache(
            partial(document_kv, self._model), base.documents, base.max_kv_bytes
        )

    @endpoint
    async def generate(self, requests: Sequence[GenerateRequest]) -> GenerateOutput:
        begun = time.perf_counter()
        done = generate(self._model, requests, self._lookup, self._end_ids, self._text)
        return GenerateOutput(time.perf_counter() - begun, tuple(done))

    def _lookup(self, ref: PrefixRef) -> Tensor:
        return composed(self._model, [self._single(part) for part in ref.parts])

    def _single(self, ref: PrefixRef) -> Tensor:
        kind, _, name = ref.name.partition("/")
        if kind == "document":
            return self._documents.get(name)
        return self._cartridges.get(name, ref.version)
