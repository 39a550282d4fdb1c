"""Train one bank of cartridges: steps, versions, snapshots, checkpoints and recovery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learning.cartridge.bank import CartridgeBank
from learning.checkpoint import Checkpoint, read_state, write_checkpoint, write_state
from learning.losses.balance import GradientBalance
from learning.losses.channel import LossChannel
from learning.losses.dpo import with_references
from learning.losses.grpo import check_policy
from learning.losses.objective import active_channels
from learning.model.decoder import LanguageModel
from learning.model.distributed import ALONE, ProcessGroup
from learning.model.loading import base_hash
from learning.policy_scores import shared_logprobs
from learning.sampler_gap import GapBounds
from learning.scoring import TeacherDistribution, score_over
from learning.step import LearningRateSchedule, new_optimizer, train_step
from learning.updates import run_updates
from protocols.errors import CheckpointError, PublishError, StaleTokenError
from protocols.spec.objective import LossSpec, ObjectiveSpec
from protocols.spec.sections import TrainSpec
from protocols.train_batch import PreferencePair, TrainBatch
from protocols.types import Sample, TrainStepOutput

SNAPSHOT = "snapshot."
HINTED = "hinted_snapshot."


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
        model: LanguageModel,
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
        # One channel alone is trained as its weight says.
        balanced = self._objective.balance == "gradient_norm" and len(self._channels) > 1
        self._balance = (
            GradientBalance(self._objective.balance_every, self._objective.balance_bound)
            if balanced
            else None
        )
        self._publish_dtype = publish_dtype
        self._gap_bounds = gap_bounds
        self._ranks = ranks
        self.bank = bank
        for part in (self.bank.frozen, self.bank.trainable.data):
            ranks.follow(part)
        self._initial = self.bank.trainable.detach().clone()
        self._reference: Tensor | None = None  # of GRPO's KL, for objectives with one of our own
        self._base_hash = base_hash(model)
        # What reads hints instead of the cartridges in training: None where those do.
        averages = self._objective.hinted_decay is not None
        self._hinted = self._initial.clone() if averages else None
        self.version = -1
        self._arm = ""
        self._step = 0
        self._last: TrainStepOutput | None = None
        self._schedule = LearningRateSchedule(spec.lr, spec.warmup_steps, 1)
        self._optimizer = new_optimizer(self.bank)
        self._last_state = last_state
        self._snapshots: dict[int, Tensor] = {}
        self._hinted_snapshots: dict[int, Tensor] = {}

    def begin(self, arm: str, steps: int) -> int:
        """Start an arm of `steps` steps from the untrained cartridges; return its version."""
        if arm == self._arm and self._step == 0:
            return self.version
        with torch.no_grad():
            self.bank.trainable.copy_(self._initial)
            if self._hinted is not None:
                self._hinted.copy_(self._initial)
        self._optimizer = new_optimizer(self.bank)
        self._schedule = LearningRateSchedule(
            self.spec.lr, min(self.spec.warmup_steps, max(1, steps // 2)), steps
        )
        if self._balance is not None:
            self._balance.restore({})
        self._reference = self._initial.clone() if self._keeps_reference() else None
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
        """Train one rollout on `version`, which must be the current one, and advance the version:
        one optimizer update, or `train.updates_per_rollout * train.minibatches` of them. Raises
        StaleTokenError for any other version. The version just trained returns its output again.
        After an error nothing is trained."""
        if version == self.version - 1 and self._last is not None:
            return self._last  # already trained, but the reply was lost
        if version != self.version:
            raise StaleTokenError(
                f"asked to train version {version}, and the trainer stands at {self.version}: a "
                "step was lost or repeated"
            )
        with self._ranks.abreast():
            result = self._train(batch, version)
        if self._hinted is not None and (decay := self._objective.hinted_decay) is not None:
            with torch.no_grad():
                self._hinted.lerp_(self.bank.trainable, 1.0 - decay)
        self._step += 1
        self.version += 1
        self._last = result
        self._keep()
        return result

    def _train(self, batch: TrainBatch, version: int) -> TrainStepOutput:
        """Make the step's updates; after an error of one of them, none."""
        spec = self.spec
        channels = [now for c in self._channels if (now := c.at(self._step)).weight]

        def update(part: TrainBatch, first: bool) -> TrainStepOutput:
            return train_step(
                self.model,
                self.bank,
                self._optimizer,
                part,
                channels,
                lr=self._schedule.at(self._step),
                clip=spec.clip,
                row_tokens=spec.row_tokens,
                version=version,
                staleness=spec.staleness,
                micro_tokens=self._objective.micro_tokens,
                compare_gradients=first and self._compares(),
                balance=self._balance,
                gap_bounds=self._gap_bounds if first else None,  # later ones are not the sampler's
                logit_bytes=spec.logit_chunk_mb * 2**20,
                recompute_layers=spec.recompute_layers,
                ranks=self._ranks,
            )

        balance = None if self._balance is None else self._balance.state()
        try:
            return run_updates(
                self._completed(batch, channels, version),
                update,
                (self.bank.trainable, self._optimizer),
                passes=spec.updates_per_rollout,
                minibatches=spec.minibatches,
                stream=f"minibatch/{spec.seed}/{self._arm}/{self._step}",
            )
        except BaseException:
            if self._balance is not None and balance is not None:
                self._balance.restore(balance)
            raise

    def _completed(
        self, batch: TrainBatch, channels: Sequence[LossChannel], version: int
    ) -> TrainBatch:
        """Return the batch with what the channels need before its first update."""
        spec = self.spec
        updates = spec.updates_per_rollout * spec.minibatches
        wanted = {name for channel in channels for name in channel.references(updates)}
        scores: dict[str, Any] = {}
        if "old" in wanted and batch.scores.get("old") is None:
            for r in batch.rl:
                if any(r.trained):
                    check_policy(batch, r, version)
            scores["old"] = self._logprobs(batch, self.bank.trainable)
        if "ref" in wanted and batch.scores.get("ref") is None:
            refresh = self._objective.grpo.kl_refresh
            if refresh and self._step % refresh == 0:
                self._reference = self.bank.trainable.detach().clone()
            assert self._reference is not None, "kept since the arm began"
            scores["ref"] = self._logprobs(batch, self._reference)
        if spec.minibatches > 1:
            for channel in channels:
                scores |= channel.of_rollout(batch)
        return replace(batch, scores={**batch.scores, **scores}) if scores else batch

    def _logprobs(self, batch: TrainBatch, trainable: Tensor) -> Tensor:
        """Return the log-probabilities of the episodes' response tokens over the cartridges with
        these trainable tokens."""
        return shared_logprobs(
            self.model,
            [r.sample for r in batch.rl],
            self.bank.names,
            torch.cat([self.bank.frozen, trainable.detach()], dim=4),
            row_tokens=self.spec.row_tokens,
            micro_tokens=self._objective.micro_tokens,
            ranks=self._ranks,
        )

    def _keeps_reference(self) -> bool:
        return any("ref" in channel.references(1) for channel in self._channels)

    @torch.no_grad()
    def references(self, pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
        """Return the pairs with reference log-probabilities under the untrained cartridges, as of
        the arm's first version. All ranks must call it."""
        first = self.version - self._step
        with self._ranks.abreast():
            kv = torch.cat([self.bank.frozen, self._initial], dim=4).to(self.model.dtype)
            prefixes = dict(zip(self.bank.names, kv, strict=True))
            return with_references(self.model, pairs, prefixes, self.spec.row_tokens, first, 0)

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
            if self._hinted is not None:
                self._hinted_snapshots[version] = self.bank.snapshot(dtype, self._hinted)
            for old in sorted(self._snapshots)[: -(self.spec.staleness + 1)]:
                del self._snapshots[old]
                self._hinted_snapshots.pop(old, None)
        if version not in self._snapshots:
            raise PublishError(
                f"version {version} cannot be published: the trainer stands at {self.version} and "
                f"still has {sorted(self._snapshots)}"
            )
        return self.bank.names, self._snapshots[version]

    def hinted_snapshot(self, version: int) -> Tensor | None:
        """Return the cartridges that read hints at a version that `snapshot` returned, in the same
        form; None where they are that version's own."""
        return self._hinted_snapshots.get(version)

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
            given = {s.cartridge: prefixes[s.cartridge].to(self.model.dtype)}
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
                if version in self._hinted_snapshots:
                    state.tensors[f"{HINTED}{version}"] = self._hinted_snapshots[version]
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
            **({} if self._hinted is None else {"hinted": self._hinted}),
            **({} if self._reference is None else {"reference": self._reference}),
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
        if self._balance is not None:
            facts["balance"] = self._balance.state()
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
        if (self._hinted is not None) != ("hinted" in tensors):
            raise CheckpointError(
                "the checkpoint was made with another teacher of hints; resume with the "
                "objective of its run"
            )
        if self._keeps_reference():
            if "reference" not in tensors:
                raise CheckpointError(
                    "the checkpoint holds no reference for objective.grpo.kl; resume with the spec "
                    "of its run"
                )
            self._reference = tensors["reference"].to(self.bank.trainable, copy=True)
        with torch.no_grad():
            self.bank.trainable.copy_(tensors["trainable"])
            self.bank.frozen.copy_(tensors["frozen"])
            if self._hinted is not None:
                self._hinted.copy_(tensors["hinted"])
        self._optimizer = new_optimizer(self.bank)
        moments = {
            # Adam keeps its step count on the host, wherever its moments are.
            k[5:]: v.clone() if k == "adam.step" else v.to(self.bank.trainable, copy=True)
            for k, v in tensors.items()
            if k.startswith("adam.")
        }
        if moments:
            self._optimizer.state[self.bank.trainable] = moments
        if self._balance is not None:
            self._balance.restore(facts.get("balance", {}))  # none in those of older versions
        self.version, self._arm, self._step = facts["version"], facts["arm"], facts["step"]
        last = facts["last"]
        self._last = last and TrainStepOutput(0.0, self.version, **last)
        self._schedule = LearningRateSchedule(self.spec.lr, facts["warmup_steps"], facts["steps"])
        self._snapshots = _versions(tensors, SNAPSHOT)
        self._hinted_snapshots = _versions(tensors, HINTED)


def _versions(tensors: Mapping[str, Tensor], stem: str) -> dict[int, Tensor]:
    return {int(k.removeprefix(stem)): v.clone() for k, v in tensors.items() if k.startswith(stem)}


def _told(output: TrainStepOutput) -> dict[str, Any]:
    """Return a step's output, JSON-able, without its time and its version, which is stored beside
    it."""
    return {k: v for k, v in asdict(output).items() if k not in ("compute_seconds", "version")}
