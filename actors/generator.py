"""GeneratorActor: samples whole batches over cartridge versions and documents (embedded torch).

`actors.engine_generator` serves requests that come and go.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial

import torch
from monarch.actor import Actor, endpoint
from torch import Tensor

from actors.setup import BaseModel
from learning.decoding import generate
from learning.model import document_kv, flush_denormals, text_of
from learning.prefixes import DocumentCache
from learning.rotation import composed
from learning.versions import CartridgeVersions
from protocols.ports import TensorPlane
from protocols.types import Generated, GenerateRequest, PrefixRef, Snapshot


class GeneratorActor(Actor):
    """One replica of the `Generate` port. Holds the last few published versions, newest by request.

    Prefix names: "cartridge/<document>" for a published version, "document/<document>" for a
    document's own KV. A request may name an ordered composition of them.
    """

    def __init__(self, base: BaseModel, end_ids: frozenset[int], keep_versions: int) -> None:
        torch.set_num_threads(base.threads)
        flush_denormals()
        self._model = base.load()
        self._plane = base.plane
        self._end_ids = end_ids
        self._text = text_of(base.path)
        self._cartridges = CartridgeVersions(keep_versions)
        self._documents = DocumentCache(
            partial(document_kv, self._model), base.documents, base.max_kv_bytes
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
    async def load(self, snapshot: Snapshot) -> int:
        """Take a published version from the tensor plane; requests may name it from now on."""
        tensors = await self._plane.get(snapshot.packet)
        kv = tensors["kv"].to(self._model.device, self._model.dtype)
        self._cartridges.add(snapshot.version, snapshot.names, kv)
        return snapshot.version

    @endpoint
    async def generate(self, requests: Sequence[GenerateRequest]) -> Generated:
        begun = time.perf_counter()
        done = generate(self._model, requests, self._lookup, self._end_ids, self._text)
        return Generated(time.perf_counter() - begun, tuple(done))

    def _lookup(self, ref: PrefixRef) -> Tensor:
        return composed(self._model, [self._single(part) for part in ref.parts])

    def _single(self, ref: PrefixRef) -> Tensor:
        kind, _, name = ref.name.partition("/")
        if kind == "document":
            return self._documents.get(name)
        return self._cartridges.get(name, ref.version)
