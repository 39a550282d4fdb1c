"""The state of training one bank of cartridges: steps, versions, snapshots and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from learning.cartridge import first_tokens
from learning.checkpoint import Checkpoint, write_checkpoint
from learning.losses import DocKL, Teacher
from learning.model import base_hash
from learning.step import Schedule, StepResult, new_optimizer, train_step
from protocols.errors import CheckpointError, StaleTokenError
from protocols.types import Sample


@dataclass(frozen=True)
class TrainerConfig:
    """What the trainer needs of the learning config; units as in `protocols.spec`."""

    tokens: int
    frozen: int
    lr: float
    warmup_steps: int
    clip: float
    row_tokens: int
    staleness: int = 0
    publish_dtype: str = "float32"
    keep_checkpoints: int = 2
    loss: DocKL = field(default_factory=DocKL)


class CartridgeTrainer:
    """Trains one bank through one or more arms; every arm starts from the same untrained bank.

    `version` numbers every state of the cartridges that could be published and is never reused,
    also not by the next arm.
    """

    def __init__(
        self, model: PreTrainedModel, documents: Mapping[str, Tensor], config: TrainerConfig
    ) -> None:
        """`documents` are the KV [L, 2, H_kv, T, D] that the cartridges stand in for."""
        self.model = model
        self.config = config
        self.bank = first_tokens(documents, config.tokens, config.frozen)
        self._initial = self.bank.trainable.detach().clone()
        self._base_hash = base_hash(model)
        self.version = -1
        self._step = 0
        self._schedule = Schedule(config.lr, config.warmup_steps, 1)
        self._optimizer = new_optimizer(self.bank)

    def begin(self, steps: int) -> int:
        """Start an arm of `steps` steps from the untrained cartridges; returns its version."""
        with torch.no_grad():
            self.bank.trainable.copy_(self._initial)
        self._optimizer = new_optimizer(self.bank)
        self._schedule = Schedule(
            self.config.lr, min(self.config.warmup_steps, max(1, steps // 2)), steps
        )
        self._step = 0
        self.version += 1
        return self.version

    def step(self, samples: Sequence[Sample], teacher: Teacher, version: int) -> StepResult:
        """One optimiser step on `version`, which must be the current one; makes the next."""
        if version != self.version:
            raise StaleTokenError(
                f"asked to train version {version}, and the trainer stands at {self.version}: a "
                "step was lost or repeated"
            )
        result = train_step(
            self.model,
            self.bank,
            self._optimizer,
            samples,
            teacher,
            loss=self.config.loss,
            lr=self._schedule.at(self._step),
            clip=self.config.clip,
            row_tokens=self.config.row_tokens,
            version=version,
            staleness=self.config.staleness,
        )
        self._step += 1
        self.version += 1
        return result

    def snapshot(self) -> tuple[int, tuple[str, ...], Tensor]:
        """(version, names, detached copy [C, L, 2, H_kv, P, D]) to publish."""
        dtype = getattr(torch, self.config.publish_dtype)
        return self.version, self.bank.names, self.bank.snapshot(dtype)

    def base_hash(self) -> str:
        return base_hash(self.model)

    def save(self, directory: Path, position: dict[str, Any], version: int) -> Path:
        """Write everything that the next step depends on; returns the checkpoint's path.

        Raises CheckpointError when `position`, which stands at `version`, is not the trainer's.
        """
        if version != self.version:
            raise CheckpointError(
                f"the trainer stands at version {self.version} and the position at {version}: a "
                "step ended half-way, and no checkpoint is made of it"
            )
        state = self._optimizer.state.get(self.bank.trainable, {})
        tensors = {
            "trainable": self.bank.trainable.detach(),
            "frozen": self.bank.frozen,
            **{f"adam.{k}": v for k, v in state.items()},
        }
        facts = {
            "names": list(self.bank.names),
            "version": self.version,
            "step": self._step,
            "steps": self._schedule.steps,
            "warmup_steps": self._schedule.warmup_steps,
            "base_hash": self._base_hash,
            "position": position,
        }
        name = f"version-{self.version:06d}"
        return write_checkpoint(
            directory, name, Checkpoint(facts, tensors), keep=self.config.keep_checkpoints
        )

    def restore(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Take a checkpoint's state; returns the position saved with it.

        Raises CheckpointError when it belongs to another base model or other documents.
        """
        facts, tensors = checkpoint.facts, checkpoint.tensors
        if facts["base_hash"] != self._base_hash:
            raise CheckpointError(
                "the checkpoint was made with other base weights; resume with the model.path of "
                "its run"
            )
        held = [tuple(tensors[part].shape) for part in ("frozen", "trainable")]
        here = [tuple(self.bank.frozen.shape), tuple(self.bank.trainable.shape)]
        if tuple(facts["names"]) != self.bank.names or held != here:
            raise CheckpointError(
                f"the checkpoint holds cartridges {facts['names']} of shapes (frozen, trainable) "
                f"{held}, this run has {list(self.bank.names)} of {here}; resume with the spec of "
                "its run"
            )
        with torch.no_grad():
            self.bank.trainable.copy_(tensors["trainable"])
            self.bank.frozen.copy_(tensors["frozen"])
        self._optimizer = new_optimizer(self.bank)
        moments = {k[5:]: v.clone() for k, v in tensors.items() if k.startswith("adam.")}
        if moments:
            self._optimizer.state[self.bank.trainable] = moments
        self.version, self._step = facts["version"], facts["step"]
        self._schedule = Schedule(self.config.lr, facts["warmup_steps"], facts["steps"])
        position: dict[str, Any] = facts["position"]
        return position
