"""Load the frozen model for actors, with the tensor plane and cartridges.

The engine's generator loads its model in a thread of its own and uses none of this.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from monarch.actor import Actor, endpoint

from actors.base import ModelSource
from learning.cartridge.versions import CartridgeVersions
from learning.model.loading import flush_denormals
from protocols.ports import TensorPlane
from protocols.types import CartridgeSnapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelActor(Actor):
    """Hold the model and the tensor plane of its process."""

    def __init__(
        self, base: ModelSource, load: Callable[[], PreTrainedModel] | None = None
    ) -> None:
        """Load the model by `load`, or from `base`, after the number of threads is set."""
        torch.set_num_threads(base.threads)
        flush_denormals()
        self._model = (load or base.load)()
        self._plane = base.plane

    @endpoint
    async def ready(self) -> int:
        """Return this process's id, once the model is loaded."""
        return os.getpid()

    @endpoint
    async def use_plane(self, plane: TensorPlane) -> None:
        """Pass tensors over this plane from now on: the previous one was lost."""
        self._plane = plane


class CartridgeReaderActor(ModelActor):
    """Hold the last few published cartridge versions beside the model."""

    def __init__(self, base: ModelSource, keep_versions: int) -> None:
        super().__init__(base)
        self._cartridges = CartridgeVersions(keep_versions)

    @endpoint
    async def load(self, snapshot: CartridgeSnapshot) -> int:
        """Load a published version from the tensor plane; requests may name it from now on."""
        tensors = await self._plane.get(snapshot.packet)
        kv = tensors["kv"].to(self._model.device, self._model.dtype)
        self._cartridges.add(snapshot.version, snapshot.names, kv)
        return snapshot.version
