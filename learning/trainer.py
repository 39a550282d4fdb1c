"""Train one bank of cartridges: steps, versions, snapshots, checkpoints and recovery."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from cartridge_forge.learning.cartridge import CartridgeBank
from cartridge_forge.learning.checkpoint import Checkpoint, LastState, part_index, write_checkpoint
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.losses.channel import LossChannel, active_channels
from cartridge_forge.learning.model.loading import base_hash
from cartridge_forge.learning.ranks import ALONE, ProcessGroup
from cartridge_forge.learning.step import StepOptions, train_step
from cartridge_forge.learning.teacher import score_over
from cartridge_forge.learning.trainer_state import (
    CartridgeProgress,
    LearningRateSchedule,
    Snapshots,
    TrainerSnapshot,
    TrainerState,
    tensor_rms,
)
from cartridge_forge.protocols.errors import CheckpointError, PublishError, StaleTokenError
from cartridge_forge.protocols.plugins import optional, resolve
from cartridge_forge.protocols.spec.sections import GapBounds, LossSpec, ObjectiveSpec, TrainSpec
from cartridge_forge.protocols.step import (
    OFFLINE_VERSION,
    PreferencePair,
    Sample,
    SampleScores,
    TrainBatch,
    TrainStepOutput,
)


class CartridgeTrainer:
    """Train one bank through one or more arms; every arm starts from the same untrained bank.

    `version` numbers every state of the cartridges that could be published and is never reused, not
    even by the next arm. Every state is written to the directory `last_state` before it is
    returned, so that the replacement of a lost trainer continues from it (`recover`). A repeated
    call (of a step, or the start of an arm) returns the first call's result. Of several ranks,
    rank 0 writes the files and all read them; of ranks that stand apart each writes the numbers of
    its own cartridges into the same files.

    Each cartridge is trained by itself: its optimizer, schedule and clip norm are its own
    (`learning.trainer_state`), and a step changes those that the batch has a loss for.
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
        keep_token_scores: bool = False,
        ranks: ProcessGroup = ALONE,
        names: Sequence[str] | None = None,
    ) -> None:
        """Take the untrained `bank`. Each of several `ranks` has a trainer of its own; all get the
        same calls. Of ranks that stand apart the bank is the rank's own, and `names` are all
        cartridges of the run. With `keep_token_scores`, `token_scores` are those of the last step.
        """
        self.model = model
        self.spec = spec
        self._objective = objective or ObjectiveSpec()
        self._channels = self._warm_channels = active_channels(self._objective, loss)
        if spec.warm_start is not None and spec.warm_start.loss is not None:
            self._warm_channels = active_channels(self._objective, spec.warm_start.loss)
        self._gap_bounds = gap_bounds
        self._keep_token_scores = keep_token_scores
        self.token_scores: Mapping[str, SampleScores] = {}
        self._ranks = ranks
        self._writes = ranks.leads or ranks.apart
        self._writers = ranks if ranks.apart else ALONE  # write the run's files together
        self.bank = bank
        for name in bank.names:
            for part in (bank.frozen[name], bank.trainable[name].data):
                ranks.follow(part)
        self._initial = {n: part.detach().clone() for n, part in bank.trainable.items()}
        # What reads hints instead of the cartridges in training: None where those do.
        averages = self._objective.hinted_decay is not None
        relative = spec.lr_scale == "rms"  # to the untrained cartridge, also after a resume
        once = LearningRateSchedule(spec.lr, spec.warmup_steps, 1)
        self._state = TrainerState(
            bank,
            {
                n: CartridgeProgress(p, once, self._balance(), tensor_rms(p) if relative else None)
                for n, p in bank.trainable.items()
            },
            hinted={n: part.clone() for n, part in self._initial.items()} if averages else None,
            # Of GRPO's KL, for objectives with one of our own. Never changed in place.
            reference=dict(self._initial) if self._keeps_reference() else None,
            base_hash=base_hash(model),
            names=tuple(names or ()),
        )
        self._dtype: torch.dtype = getattr(torch, publish_dtype)
        self._snapshots = Snapshots(self._dtype, spec.staleness + 1)
        self._last_state = None if last_state is None else LastState(last_state)
        self._checkpoint: Path | None = None  # which the state goes on from

    @property
    def version(self) -> int:
        """Return the version of the cartridges; -1 before the first arm."""
        return self._state.version

    def begin(self, arm: str, steps: int, updates: Mapping[str, int] | None = None) -> int:
        """Start an arm of `steps` steps from the untrained cartridges; return its version.

        A cartridge's learning rate follows its own steps, those that train it. `updates` says of
        which cartridges there will be fewer than `steps`, and how many.
        """
        state = self._state
        if arm == state.arm and state.step == 0:
            return state.version
        state.version += 1
        for name, learner in state.progress.items():
            planned = max(1, (updates or {}).get(name, steps))
            warmup = min(self.spec.warmup_steps, max(1, planned // 2))
            since = state.version if learner.steps or learner.since < 0 else learner.since
            with torch.no_grad():
                learner.parameter.copy_(self._initial[name])
                if state.hinted is not None:
                    state.hinted[name].copy_(self._initial[name])
            learner.restart(LearningRateSchedule(self.spec.lr, warmup, planned), since)
        if state.reference is not None:
            state.reference = dict(self._initial)
        state.arm, state.step, state.last = arm, 0, None
        self._keep()
        return state.version

    def step(self, batch: TrainBatch, version: int) -> TrainStepOutput:
        """Train one rollout on `version`, which must be the current one, and advance the version:
        one optimizer update, or `train.updates_per_rollout * train.minibatches` of them. Raises
        StaleTokenError for any other version. The version just trained returns its output again.
        After an error nothing is trained."""
        state = self._state
        if version == state.version - 1 and state.last is not None:
            return state.last  # already trained, but the reply was lost
        if version != state.version:
            raise StaleTokenError(
                f"asked to train version {version}, and the trainer stands at {state.version}: a "
                "step was lost or repeated"
            )
        with self._ranks.abreast():
            result = self._train(batch, version)
        state.step += 1
        state.version += 1
        state.last = result
        for name in [name for name in result.cartridges if name in state.progress]:
            learner = state.progress[name]
            learner.steps += 1
            learner.since = state.version
            if state.hinted is not None and (decay := self._objective.hinted_decay) is not None:
                with torch.no_grad():
                    state.hinted[name].lerp_(learner.parameter, 1.0 - decay)
        self._keep()
        return result

    def _train(self, batch: TrainBatch, version: int) -> TrainStepOutput:
        """Make the step's updates; after an error of one of them, none."""
        spec = self.spec
        state = self._state
        warm = self._is_warm(batch)
        of_phase = self._warm_channels if warm else self._channels
        channels = [now for c in of_phase if (now := c.at(state.step)).weight]
        warm_lr = spec.warm_start.lr if warm and spec.warm_start is not None else None
        for learner in state.progress.values():
            learner.factor = 1.0 if warm_lr is None else warm_lr / spec.lr
        scores = None
        if self._keep_token_scores and (token_scores := optional("hooks", "token_scores")):
            scores = token_scores()  # an observer: no number depends on it
        options = StepOptions(
            clip=spec.clip,
            row_tokens=spec.row_tokens,
            staleness=spec.staleness,
            micro_tokens=self._objective.micro_tokens,
            logit_bytes=spec.logit_chunk_mb * 2**20,
            recompute_layers=spec.recompute_layers,
            observe=None if scores is None else scores.add,
        )
        every = self._objective.compare_every
        first_options = replace(
            options,
            gap_bounds=self._gap_bounds,  # later updates' cartridges are not the sampler's
            compare_gradients=every > 0 and state.step % every == 0,
        )

        def update(part: TrainBatch, first: bool) -> TrainStepOutput:
            return train_step(
                self.model, self.bank, state.progress, part, channels, version,
                first_options if first else options, self._ranks,
            )  # fmt: skip

        batch = self._completed(batch, channels, version)
        if spec.updates_per_rollout * spec.minibatches == 1:
            result = update(batch, True)
        else:
            result = resolve("hooks", "updates")(
                batch,
                update,
                state.progress,
                passes=spec.updates_per_rollout,
                minibatches=spec.minibatches,
                stream=f"minibatch/{spec.seed}/{state.arm}",
            )
        self.token_scores = {} if scores is None else scores.of_all(self._ranks)
        return result

    def _is_warm(self, batch: TrainBatch) -> bool:
        """Return whether a batch is of the warm start: of the on-policy arm, on text that the
        teacher alone wrote."""
        if self.spec.warm_start is None or self._state.arm != "on_policy":
            return False
        return {v for s in batch.doc for v in s.versions} == {OFFLINE_VERSION}

    def _balance(self) -> Any:
        """Return a cartridge's balance; one channel alone is trained as its weight says."""
        spec = self._objective
        if spec.balance != "gradient_norm" or len(self._channels) < 2:
            return None
        return resolve("hooks", "balance")(spec.balance_every)

    def _completed(
        self, batch: TrainBatch, channels: Sequence[LossChannel], version: int
    ) -> TrainBatch:
        """Return the batch with what the channels need before its first update."""
        spec = self.spec
        updates = spec.updates_per_rollout * spec.minibatches
        wanted = {name for channel in channels for name in channel.references(updates)}
        scores: dict[str, Any] = {}
        if "old" in wanted and batch.scores.get("old") is None:
            self._policy.check(batch, version)
            scores["old"] = self._policy.logprobs(batch, self.bank.trainable)
        if "ref" in wanted and batch.scores.get("ref") is None:
            refresh = self._objective.reference_refresh
            reference = self._state.reference
            assert reference is not None, "kept since the arm began"
            for name in self._cartridges_of(r.sample for r in batch.rl):
                learner = self._state.progress[name]
                if refresh and learner.steps % refresh == 0:
                    reference[name] = learner.parameter.detach().clone()
            scores["ref"] = self._policy.logprobs(batch, reference)
        if spec.minibatches > 1:
            for channel in channels:
                scores |= channel.of_rollout(batch)
        return replace(batch, scores={**batch.scores, **scores}) if scores else batch

    @cached_property
    def _policy(self) -> Any:
        """Return what computes log-probabilities to compare the policy with."""
        return resolve("hooks", "policy_scores")(
            self.model, self.bank, self._ranks, self.spec.row_tokens, self._objective.micro_tokens
        )

    def _cartridges_of(self, texts: Iterable[Sample | PreferencePair]) -> list[str]:
        """Return the cartridges of these samples that this rank holds."""
        return sorted({one.cartridge for one in texts} & self._state.progress.keys())

    def _keeps_reference(self) -> bool:
        return any("ref" in channel.references(1) for channel in self._channels)

    @torch.no_grad()
    def references(self, pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
        """Return the pairs with reference log-probabilities under the untrained cartridges, as of
        the arm's first version. All ranks must call it."""
        first = self.version - self._state.step
        with self._ranks.abreast():
            rows = self._policy.references(pairs, self._initial, first)
            references = {i: reference for i, *reference in self._of_all(rows)}
        return [
            replace(
                pair, ref_chosen=references[i][0], ref_rejected=references[i][1], ref_version=first
            )
            for i, pair in enumerate(pairs)
        ]

    def _of_all(self, rows: list[list[Any]]) -> list[list[Any]]:
        """Return what ranks that stand apart found for their own cartridges, together."""
        if not self._ranks.apart:
            return rows
        return [row for one in self._ranks.gather({"told": rows}) for row in one["told"]]

    def snapshot(self, version: int) -> TrainerSnapshot:
        """Return a version to publish, now or again. Raises PublishError for any version but the
        current one and the few published last."""
        state = self._state
        if version == state.version:
            self._snapshots.add(version, state.since, self.bank, state.hinted)
        snapshot = self._snapshots.versions.get(version)
        if snapshot is None:
            raise PublishError(
                f"version {version} cannot be published: the trainer stands at {state.version} and "
                f"still has {sorted(self._snapshots.versions)}"
            )
        return snapshot

    @torch.no_grad()
    def greedy_deficit(self, samples: Sequence[Sample], version: int) -> list[float]:
        """Return for each sample by how many nats a response token is at most less likely than the
        likeliest one, under the cartridges of `version`. Raises PublishError for any version but
        the current one."""
        if version != self.version:
            raise PublishError(
                f"version {version} cannot be scored: the trainer stands at {self.version}"
            )
        rows: list[list[Any]] = []
        for i, s in enumerate(samples):
            if self._ranks.apart and s.cartridge not in self.bank.names:
                continue  # another rank's
            (kv,) = self.bank.kv([s.cartridge])
            prefixes = {s.cartridge: kv.to(self.model.dtype)}
            logits = score_over(self.model, [s], prefixes, self.spec.row_tokens).float()
            response = logits.gather(-1, torch.tensor(s.response_ids)[:, None].to(logits.device))
            rows.append([i, (logits.max(-1).values - response[:, 0]).max().item()])
        return [deficit for _, deficit in sorted(self._of_all(rows))]

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
        if self._writes:
            with self._ranks.abreast():
                write_checkpoint(
                    directory,
                    name,
                    self._state.checkpoint(position),
                    keep=self.spec.keep_checkpoints,
                    previous=self._checkpoint,
                    writers=self._writers,
                )
            self._checkpoint = directory / name
        return directory / name

    def recover(self) -> int:
        """Continue from the state that the trainer before this one wrote to `last_state`; return
        the version. Without that nothing was trained yet, and the state is unchanged."""
        if self._last_state is not None and (last := self._last_state.read(self.holds)):
            self._take(last)
        return self.version

    def holds(self, part: str) -> bool:
        """Return whether a part of a checkpoint is of a cartridge that this rank holds."""
        names = self._state.names[part_index(part) :]
        return not self._ranks.apart or names[:1] == () or names[0] in self._state.progress

    def _keep(self) -> None:
        """Write the state, with the published versions before the current one that rollouts in
        progress may sample with: they are published again if the tensor plane is lost."""
        if self._last_state is not None and self._writes:
            oldest = self.version - self.spec.staleness
            versions = sorted(self._snapshots.versions.items())
            state = self._state.checkpoint({}, [one for v, one in versions if v >= oldest])
            with self._ranks.abreast():
                self._last_state.write(state, self._writers)

    def restore(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Take a checkpoint's state; return the position saved with it. Raises CheckpointError when
        it belongs to another base model or other documents."""
        self._take(checkpoint)
        self._checkpoint = checkpoint.path
        if self._last_state is not None:
            self._last_state.forget()
        self._keep()  # replaces a later `last_state` of the interrupted run
        position: dict[str, Any] = checkpoint.facts["position"]
        return position

    def _take(self, checkpoint: Checkpoint) -> None:
        self._snapshots.restore(self._state.take(checkpoint, self.spec.lr, self._dtype))
