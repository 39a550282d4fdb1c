"""SDPOTeacherActor: the student's own model and cartridges, reading what the student had not read.

A hint before the turn that went wrong (sdpo), or a teacher's preferred action in place of the
student's (the reference of replay_dpo).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch
from monarch.actor import Actor, endpoint
from torch import Tensor

from actors.setup import BaseModel, fresh_key
from learning.model import flush_denormals
from learning.scoring import score_kept, with_references
from learning.versions import CartridgeVersions
from protocols.channels import PreferencePair
from protocols.ports import TensorPlane
from protocols.types import Sample, Scored, Snapshot


class SDPOTeacherActor(Actor):
    """Holds the last few published cartridge versions, as a generator does."""

    def __init__(
        self, base: BaseModel, row_tokens: int, keep_top: int | None, keep_versions: int
    ) -> None:
        """`keep_top` entries a token are sent, or all logits for None."""
        torch.set_num_threads(base.threads)
        flush_denormals()
        self._model = base.load()
        self._plane = base.plane
        self._row_tokens = row_tokens
        self._keep_top = keep_top
        self._cartridges = CartridgeVersions(keep_versions)

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
        """Take a published version from the tensor plane."""
        tensors = await self._plane.get(snapshot.packet)
        kv = tensors["kv"].to(self._model.device, self._model.dtype)
        self._cartridges.add(snapshot.version, snapshot.names, kv)
        return snapshot.version

    @endpoint
    async def score(self, stem: str, samples: Sequence[Sample], version: int) -> Scored:
        """Put the distributions over every response token of hinted turns under a key of this
        stem: with the cartridges of `version`, each sample's context before its own tokens."""
        begun = time.perf_counter()
        prefixes = self._prefixes([s.document for s in samples], version)
        tensors = score_kept(self._model, samples, prefixes, self._row_tokens, self._keep_top)
        seconds = time.perf_counter() - begun
        packet = await self._plane.put(fresh_key(stem), tensors)
        return Scored(seconds, packet, len(next(iter(tensors.values()))))

    @endpoint
    async def references(
        self, pairs: Sequence[PreferencePair], version: int
    ) -> list[PreferencePair]:
        """The pairs with reference log-probabilities of `version`."""
        prefixes = self._prefixes([p.document for p in pairs], version)
        return with_references(self._model, pairs, prefixes, self._row_tokens, version, 0)

    def _prefixes(self, documents: Sequence[str], version: int) -> dict[str, Tensor]:
        return {name: self._cartridges.get(name, version) for name in sorted(set(documents))}
