"""Generators whose model fails in a forward pass over some prompts, as it would for want of memory.

The pass that reads POISON ends the engine, wherever it is tried. The failure is in the model, below
all that a request is checked by.
"""

from __future__ import annotations

from typing import Any

import torch

from actors.engine_generator import EngineGeneratorActor

POISON = (1313, 1313, 1313)  # in a prompt; nothing samples it


def poisoned(ids: torch.Tensor) -> bool:
    width = len(POISON)
    found = torch.tensor(POISON, device=ids.device)
    return len(ids) >= width and bool((ids.unfold(0, width, 1) == found).all(-1).any())


def failing(module: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    ids = args[0] if args else named["input_ids"]
    if poisoned(ids):
        raise MemoryError("no memory for this pass")


class DyingGenerator(EngineGeneratorActor):
    """Runs either engine, over a model that fails."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._engine.started.result(120)
        engine: Any = self._engine._engine
        if hasattr(engine, "_model"):
            model = engine._model
        else:
            executor = engine._engine.engine_core.engine_core.model_executor
            model = executor.driver_worker.worker.model_runner.model
        model.register_forward_pre_hook(failing, with_kwargs=True)
