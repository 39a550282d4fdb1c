"""Train one bank of cartridges: steps, versions, snapshots, checkpoints and recovery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from learning.cartridge.bank import CartridgeBank
from learning.checkpoint import Checkpoint, read_state, write_checkpoint, write_state
from learning.losses.objective import active_channels
from learning.model.distributed import ALONE, ProcessGroup
from learning.model.loading import base_hash
from learning.sampler_gap import GapBounds
from learning.scoring import TeacherDistribution, score_over
from learning.step import LearningRateSchedule, new_optimizer, train_step
from protocols.errors import CheckpointError, PublishError, StaleTokenError
from protocols.spec.objective import LossSpec, ObjectiveSpec
from protocols.spec.sections import TrainSpec
from protocols.train_batch import TrainBatch
from protocols.types import Sample, TrainStepOutput

if TYPE_CHECKING:  # importing it takes seconds, which only code that loads a model should pay
    from transformers import PreTrainedModel

SNAPSHOT = "snapshot."


class CartridgeTrainer:
    """Train one bank through one or more arms; every arm starts from the same untrained bank.

    `version` numbers every state of the cartridges that could be published and is never reused, not
    even by the next arm. Every state is written to the file `last_state` before it is returned, so
    that the replacement of a lost trainer continues from it (`recover`). A repeated call (of a
    step, or the start of an arm) returns the first call's result. Of several ranks, rank 0 writes
    the files and all read them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        bank: CartridgeBank,
        spec: TrainSpec,
        last_state: Path | None = None,
        *,
        objective: ObjectiveSpec | None = None,
        loss: LossSpec | None = None,
        publish_dtype: str = "float32",
        gap_bounds: GapBounds | None = None,
        ranks: ProcessGroup = ALONE,
    ) -> None:
        """Take the untrained `bank`. Each of several `ranks` has a trainer of its own; all get the
        same calls."""
        self.model = model
        self.spec = spec
        self._objective = objective or ObjectiveSpec()
        self._channels = active_channels(self._objective, loss)
        self._publish_dtype = publish_dtype
        self._gap_bounds = gap_bounds
        self._ranks = ranks
        self.bank = bank
        for part in (self.bank.frozen, self.bank.trainable.data):
            ranks.follow(part)
        self._initial = self.bank.trainable.detach().clone()
        self._base_hash = base_hash(model)
        self.version = -1
        self._arm = ""
        self._step = 0
        self._last: TrainStepOutput | None = None
        self._schedule = LearningRateSchedule(spec.lr, spec.warmup_steps, 1)
        self._optimizer = new_optimizer(self.bank)
        self._last_state = last_state
        self._snapshots: dict[int, Tensor] = {}

    def begin(self, arm: str, steps: int) -> int:
        """Start an arm of `steps` steps from the untrained cartridges; return its version."""
        if arm == self._arm and self._step == 0:
            return self.version
        with torch.no_grad():
            self.bank.trainable.copy_(self._initial)
        self._optimizer = new_optimizer(self.bank)
        self._schedule = LearningRateSchedule(
            self.spec.lr, min(self.spec.warmup_steps, max(1, steps // 2)), steps
        )
        self._arm, self._step, self._last = arm, 0, None
        self.version += 1
        self._keep()
        return self.version

    def step(
        self, samples: Sequence[Sample], teacher: TeacherDistribution, version: int
    ) -> TrainStepOutput:
        """Run `step_on` with document distillation samples only."""
        return self.step_on(
            TrainBatch(doc=tuple(samples), scores={"doc_teacher": teacher}), version
        )

    def step_on(self, batch: TrainBatch, version: int) -> TrainStepOutput:
        """Run one optimizer step on `version`, which must be the current one, and advance the
        version. Raises StaleTokenError for any other version. The version just trained returns its
        output again."""
        if version == self.version - 1 and self._last is not None:
            return self._last  # already trained, but the reply was lost
        if version != self.version:
            raise StaleTokenError(
                f"asked to train version {version}, and the trainer stands at {self.version}: a "
                "step was lost or repeated"
            )
        with self._ranks.abreast():
            result = train_step(
                self.model,
                self.bank,
                self._optimizer,
                batch,
                [now for c in self._channels if (now := c.at(self._step)).weight],
                lr=self._schedule.at(self._step),
                clip=self.spec.clip,
                row_tokens=self.spec.row_tokens,
                version=version,
                staleness=self.spec.staleness,
                micro_tokens=self._objective.micro_tokens,
                compare_gradients=self._compares(),
                logit_bytes=self.spec.logit_chunk_mb * 2**20,
                recompute_layers=self.spec.recompute_layers,
                gap_bounds=self._gap_bounds,
                ranks=self._ranks,
            )
        self._step += 1
        self.version += 1
        self._last = result
        self._keep()
        return result

    def _compares(self) -> bool:
        every = self._objective.compare_every
        return every > 0 and self._step % every == 0

    def snapshot(self, version: int) -> tuple[tuple[str, ...], Tensor]:
        """Return (names, detached copy [C, L, 2, H_kv, P, D]) of a version to publish, now or
        again. Raises PublishError for any version but the current one and the few published
        last."""
        if version == self.version and version not in self._snapshots:
            dtype = getattr(torch, self._publish_dtype)
            self._snapshots[version] = self.bank.snapshot(dtype)
            for old in sorted(self._snapshots)[: -(self.spec.staleness + 1)]:
                del self._snapshots[old]
        if version not in self._snapshots:
            raise PublishError(
                f"version {version} cannot be published: the trainer stands at {self.version} and "
                f"still has {sorted(self._snapshots)}"
            )
        return self.bank.names, self._snapshots[version]

    @torch.no_grad()
    def greedy_deficit(self, samples: Sequence[Sample], version: int) -> list[float]:
        """Return for each sample by how many nats a response token is at most less likely than the
        likeliest one, under the cartridges of `version`. Raises PublishError for any version but
        the current one."""
        if version != self.version:
            raise PublishError(
                f"version {version} cannot be scored: the trainer stands at {self.version}"
            )
        prefixes = dict(zip(self.bank.names, self.bank.kv(), strict=True))
        found = []
        for s in samples:
            given = {s.document: prefixes[s.document].to(self.model.dtype)}
            logits = score_over(self.model, [s], given, self.spec.row_tokens).float()
            own = logits.gather(-1, torch.tensor(s.response_ids)[:, None].to(logits.device))
            found.append((logits.max(-1).values - own[:, 0]).max().item())
        return found

    def base_hash(self) -> str:
        """Return the SHA-256 of the base as it is now; for a sharded base all ranks must call
        it."""
        return base_hash(self.model)

    def save(self, directory: Path, position: dict[str, Any], version: int) -> Path:
        """Write the state that the next step depends on, from rank 0; return the checkpoint's path.
        The checkpoint does not depend on the number of ranks. Raises CheckpointError when
        `version`, the version of `position`, is not the trainer's."""
        if version != self.version:
            raise CheckpointError(
                f"the trainer stands at version {self.version} and the position at {version}: a "
                "step ended half-way, and no checkpoint is made of it"
            )
        name = f"version-{self.version:06d}"
        if not self._ranks.leads:
            return directory / name
        return write_checkpoint(
            directory, name, self._state(position), keep=self.spec.keep_checkpoints
        )

    def recover(self) -> int:
        """Continue from the state that the trainer before this one wrote to `last_state`; return
        the version. Without that file nothing was trained yet, and the state is unchanged."""
        if self._last_state is not None and self._last_state.exists():
            self._take(read_state(self._last_state))
        return self.version

    def _keep(self) -> None:
        if self._last_state is not None and self._ranks.leads:
            state = self._state({})
            for version in self._needed():
                state.tensors[f"{SNAPSHOT}{version}"] = self._snapshots[version]
            write_state(self._last_state, state)

    def _needed(self) -> list[int]:
        """Return the published versions before the current one that rollouts in progress may sample
        with: they are published again if the tensor plane is lost."""
        oldest = self.version - self.spec.staleness
        return [v for v in sorted(self._snapshots) if oldest <= v < self.version]

    def _state(self, position: dict[str, Any]) -> Checkpoint:
        """Return the state that the next step depends on. Random streams have no state: every draw
        has a generator named by seed, step and index."""
        state = self._optimizer.state.get(self.bank.trainable, {})
        tensors = {
            "trainable": self.bank.trainable.detach(),
            "frozen": self.bank.frozen,
            **{f"adam.{k}": v for k, v in state.items()},
        }
        facts = {
            "names": list(self.bank.names),
            "version": self.version,
            "arm": self._arm,
            "step": self._step,
            "last": None if self._last is None else _told(self._last),
            "steps": self._schedule.steps,
            "warmup_steps": self._schedule.warmup_steps,
            "base_hash": self._base_hash,
            "position": position,
        }
        return Checkpoint(facts, tensors)

    def restore(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Take a checkpoint's state; return the position saved with it. Raises CheckpointError when
        it belongs to another base model or other documents."""
        self._take(checkpoint)
        self._keep()  # replaces a later `last_state` of the interrupted run
        position: dict[str, Any] = checkpoint.facts["position"]
        return position

    def _take(self, checkpoint: Checkpoint) -> None:
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
        moments = {
            # Adam keeps its step count on the host, wherever its moments are.
            k[5:]: v.clone() if k == "adam.step" else v.to(self.bank.trainable, copy=True)
            for k, v in tensors.items()
            if k.startswith("adam.")
        }
        if moments:
            self._optimizer.state[self.bank.trainable] = moments
        self.version, self._arm, self._step = facts["version"], facts["arm"], facts["step"]
        last = facts["last"]
        self._last = last and TrainStepOutput(0.0, self.version, **last)
        self._schedule = LearningRateSchedule(self.spec.lr, facts["warmup_steps"], facts["steps"])
        self._snapshots = {
            int(k.removeprefix(SNAPSHOT)): v.clone()
            for k, v in tensors.items()
            if k.startswith(SNAPSHOT)
        }


def _told(output: TrainStepOutput) -> dict[str, Any]:
    """Return a step's output, JSON-able, without its time and its version, which is stored beside
    it."""
    return {k: v for k, v in asdict(output).items() if k not in ("compute_seconds", "version")}
