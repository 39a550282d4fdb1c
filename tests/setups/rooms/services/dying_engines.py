"""Generators whose model fails in a forward pass over some prompts, as it would for want of memory.

The pass that reads POISON ends the engine, wherever it is tried. The failure is in the model, below
all that a request is checked by.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cartridge_forge.actors.base import ModelSource
from cartridge_forge.actors.doc_teacher import DocTeacherActor
from cartridge_forge.actors.engine_generator import EngineGeneratorActor
from cartridge_forge.actors.generator import GeneratorActor
from cartridge_forge.protocols.step import PrefixRef

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
        self._engine.started.result()
        engine: Any = self._engine._engine
        if hasattr(engine, "_model"):
            model = engine._model
        else:
            executor = engine._engine.engine_core.engine_core.model_executor
            model = executor.driver_worker.worker.model_runner.model
        model.register_forward_pre_hook(failing, with_kwargs=True)


def fail_once(model: torch.nn.Module, mark: Path, passes: int) -> None:
    """Have the first process to compute so many passes fail in the last of them, and no other after
    it: `mark` is the file that says that one has."""
    done = 0

    def failing_once(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal done
        done += 1
        if done == passes and not mark.exists():
            mark.touch()
            raise MemoryError("no memory for this pass")

    model.register_forward_pre_hook(failing_once)


def run_of(base: ModelSource) -> Path:
    """Return the directory of the run that an actor belongs to."""
    assert base.kv_files is not None
    return Path(base.kv_files).parent


class DyingRolloutGenerator(GeneratorActor):
    """Fails once, in the middle of a rollout."""

    def __init__(self, base: ModelSource, *args: Any) -> None:
        super().__init__(base, *args)
        fail_once(self._model, run_of(base) / "generator_died", 60)


class DyingDocTeacher(DocTeacherActor):
    """Fails once, while it scores a later step."""

    def __init__(self, base: ModelSource, *args: Any) -> None:
        super().__init__(base, *args)
        fail_once(self._model, run_of(base) / "doc_teacher_died", 2)


class DeadlyRolloutGenerator(GeneratorActor):
    """Fails in every rollout of a version after the first."""

    def _lookup(self, ref: PrefixRef) -> torch.Tensor:
        if ref.version > 0:
            raise MemoryError("no memory for this pass")
        return super()._lookup(ref)
