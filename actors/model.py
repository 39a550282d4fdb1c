"""Hold the model and the tensor plane of a process: what every actor with a model begins with."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from monarch.actor import Actor, endpoint

from cartridge_forge.actors.base import ModelSource
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import flush_denormals
from cartridge_forge.learning.ranks import FreedMemory
from cartridge_forge.protocols.ports import TensorPlane


class ModelActor(Actor):
    """Hold the model and the tensor plane of its process."""

    def __init__(self, base: ModelSource, load: Callable[[], LanguageModel] | None = None) -> None:
        """Load the model by `load`, or from `base`, after the number of threads is set."""
        torch.set_num_threads(base.threads)
        flush_denormals()
        self._model = (load or base.load)()
        self._plane = base.plane
        self._freed = FreedMemory()

    @endpoint
    async def ready(self) -> int:
        """Return this process's id, once the model is loaded."""
        return os.getpid()

    @endpoint
    async def use_plane(self, plane: TensorPlane) -> None:
        """Pass tensors over this plane from now on: the previous one was lost."""
        self._plane = plane
