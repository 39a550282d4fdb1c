"""Hold the state of a trainer that its next step depends on; turn it into a checkpoint and back.

Every cartridge of a bank has its own progress: optimizer, schedule and counts. A step that has no
loss-bearing token for a cartridge changes none of them, so what a cartridge becomes does not depend
on the others of a run.

Beside the state, `Snapshots` keeps the versions that may be published, now or again. Random streams
have no state: every draw has a generator named by seed, step and index.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from cartridge_forge.learning.cartridge import CartridgeBank
from cartridge_forge.learning.checkpoint import CARTRIDGE, Checkpoint, part_name
from cartridge_forge.learning.decoder import BACKWARD
from cartridge_forge.protocols.errors import CheckpointError
from cartridge_forge.protocols.step import TrainStepOutput


@dataclass(frozen=True)
class LearningRateSchedule:
    """Compute the learning rate over `steps`: linear warm-up, then cosine down to a tenth of the
    peak."""

    lr: float
    warmup_steps: int
    steps: int

    def at(self, step: int) -> float:
        """Return the learning rate of 0-based `step`."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        decay_steps = max(1, self.steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / decay_steps)
        return self.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def tensor_rms(kv: Tensor) -> Tensor:
    """Return the root mean square of each layer's keys and of its values, [L, 2, 1, 1, 1], of a
    cartridge [L, 2, H_kv, P, D]."""
    return kv.detach().square().mean(dim=(2, 3, 4), keepdim=True).sqrt()


class CartridgeProgress:
    """Train one parameter with Adam of its own, without weight decay.

    steps    steps of the arm that trained the cartridge
    since    the version that last changed its numbers
    moments  Adam's tensors by name; none before the first update
    balance  of the channels' gradients (`plugins.objectives.balance`); None where the weights are
             taken as they are
    scale    what the learning rate is multiplied by, broadcast over the parameter; None: nothing
    factor   what the schedule's learning rate is multiplied by in the present step
    """

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        schedule: LearningRateSchedule,
        balance: Any = None,
        scale: Tensor | None = None,
    ) -> None:
        self.parameter, self.schedule, self.balance = parameter, schedule, balance
        self._scale, self.factor = scale, 1.0
        self.since, self.steps = -1, 0
        self.moments: dict[str, Tensor] = {}

    @property
    def lr(self) -> float:
        """Return the learning rate of the cartridge's next step."""
        return self.schedule.at(self.steps) * self.factor

    def restart(
        self,
        schedule: LearningRateSchedule,
        since: int,
        steps: int = 0,
        moments: Mapping[str, Tensor] | None = None,
        balance: Mapping[str, Any] | None = None,
    ) -> None:
        """Stand at these counts, moments (copied) and means of the balance; by default at the start
        of an arm. The parameter is not changed."""
        self.schedule, self.since, self.steps = schedule, since, steps
        self.moments = {
            # The count of updates stays on the host, wherever the moments are.
            name: t.clone() if name == "step" else t.to(self.parameter, copy=True)
            for name, t in (moments or {}).items()
        }
        if self.balance is not None:
            self.balance.restore(balance or {})

    def update(self, clip: float) -> float:
        """Clip the parameter's gradient to the norm `clip` and make one update; return the norm
        before."""
        norm = torch.nn.utils.clip_grad_norm_([self.parameter], clip)
        if self._scale is None:
            self._adam()
            return norm.item()
        numbers = self.parameter.detach().clone()
        self._adam()
        with torch.no_grad():  # Adam's step is proportional to its rate, without weight decay
            self.parameter.copy_(numbers.addcmul(self.parameter - numbers, self._scale))
        return norm.item()

    @torch.no_grad()
    def _adam(self) -> None:
        """Make one step of Adam, by the function that `torch.optim.Adam` calls. An object of that
        class imports torch's compiler when it is made: 900 modules that nothing else here needs."""
        parameter, moments = self.parameter, self.moments
        if not moments:
            moments["step"] = torch.tensor(0.0)
            moments |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        assert parameter.grad is not None
        adam(
            [parameter], [parameter.grad], [moments["exp_avg"]], [moments["exp_avg_sq"]], [],
            [moments["step"]], lr=self.lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0,
            amsgrad=False, maximize=False,
        )  # fmt: skip


PUBLISHED = "published"  # begins the name of a part with a copy that was published
MOMENTS = "adam."
# Of a step's output: its time, its tokens' scores, and its version, which is stored beside it.
NOT_STORED = ("compute_seconds", "token_scores", "version")


@dataclass(frozen=True)
class TrainerSnapshot:
    """Hold detached copies of every cartridge at one version, in the dtype to publish.

    Copies are shared between versions: a cartridge whose numbers did not change is the same tensor
    as in the version before.

    since   by name, the version that last changed the cartridge's numbers
    kv      by name, [L, 2, H_kv, P, D]
    hinted  the cartridges that read hints, in the same form; None where they are those of `kv`
    """

    version: int
    since: Mapping[str, int]
    kv: Mapping[str, Tensor]
    hinted: Mapping[str, Tensor] | None


@dataclass
class TrainerState:
    """Hold a bank with the progress of each cartridge, by name. Of several ranks that stand apart
    this is one's, and `names` are all cartridges of the run.

    hinted     the trainable parts of the cartridges that read hints; None where the bank's own do
    reference  those of GRPO's reference, of objectives that have one
    version    of the bank; -1 before the first arm
    step       steps done of the arm
    last       the output of the last of them
    """

    bank: CartridgeBank
    progress: dict[str, CartridgeProgress]
    hinted: dict[str, Tensor] | None
    reference: dict[str, Tensor] | None
    base_hash: str
    names: tuple[str, ...] = ()
    version: int = -1
    arm: str = ""
    step: int = 0
    last: TrainStepOutput | None = None

    def __post_init__(self) -> None:
        self.names = self.names or self.bank.names

    @property
    def since(self) -> dict[str, int]:
        """Return by cartridge the version that last changed its numbers."""
        return {name: progress.since for name, progress in self.progress.items()}

    def checkpoint(
        self, position: dict[str, Any], snapshots: Sequence[TrainerSnapshot] = ()
    ) -> Checkpoint:
        """Return the state with the run's `position` and the published `snapshots`. Of these it
        holds the copies of numbers that have changed since."""
        facts: dict[str, Any] = {
            "names": list(self.names),
            "version": self.version,
            "arm": self.arm,
            "step": self.step,
            "last": None
            if self.last is None
            else {k: v for k, v in asdict(self.last).items() if k not in NOT_STORED},
            "base_hash": self.base_hash,
            "backward": dict(BACKWARD),
            "position": position,
            "cartridges": {
                name: {
                    "since": one.since,
                    "step": one.steps,
                    "steps": one.schedule.steps,
                    "warmup_steps": one.schedule.warmup_steps,
                    **({} if one.balance is None else {"balance": one.balance.state()}),
                }
                for name, one in self.progress.items()
            },
            "published": {
                str(snapshot.version): [snapshot.since[name] for name in self.bank.names]
                for snapshot in snapshots
            },
        }
        parts: dict[str, dict[str, Tensor]] = {}
        index = {name: i for i, name in enumerate(self.names)}
        for name, progress in self.progress.items():
            i = index[name]
            parts[part_name(CARTRIDGE, i, progress.since)] = {
                "trainable": progress.parameter.detach(),
                "frozen": self.bank.frozen[name],
                **{f"{MOMENTS}{k}": v for k, v in progress.moments.items()},
                **({} if self.hinted is None else {"hinted": self.hinted[name]}),
                **({} if self.reference is None else {"reference": self.reference[name]}),
            }
            for snapshot in snapshots:
                if snapshot.since[name] != progress.since:
                    parts[part_name(PUBLISHED, i, snapshot.since[name])] = {
                        "kv": snapshot.kv[name],
                        **({} if snapshot.hinted is None else {"hinted": snapshot.hinted[name]}),
                    }
        return Checkpoint(facts, parts)

    def take(self, checkpoint: Checkpoint, lr: float, dtype: torch.dtype) -> list[TrainerSnapshot]:
        """Take a checkpoint's state and return its published snapshots, in `dtype`. `lr` is the
        peak learning rate. Raises CheckpointError, and changes nothing, for a checkpoint of another
        base, other cartridges or another objective."""
        facts = checkpoint.facts
        self._check(checkpoint)
        for name, progress in self.progress.items():
            tensors, counts = checkpoint.cartridge(name), facts["cartridges"][name]
            with torch.no_grad():
                progress.parameter.copy_(tensors["trainable"])
                self.bank.frozen[name].copy_(tensors["frozen"])
            if self.hinted is not None:
                self.hinted[name] = tensors["hinted"].to(progress.parameter, copy=True)
            if self.reference is not None:
                self.reference[name] = tensors["reference"].to(progress.parameter, copy=True)
            progress.restart(
                LearningRateSchedule(lr, counts["warmup_steps"], counts["steps"]),
                counts["since"],
                counts["step"],
                {k.removeprefix(MOMENTS): v for k, v in tensors.items() if k.startswith(MOMENTS)},
                counts.get("balance", {}),  # none in those of older versions
            )
        self.version, self.arm, self.step = facts["version"], facts["arm"], facts["step"]
        BACKWARD.update(facts.get("backward", {"float32": "onednn"}))  # older ones have none
        last = facts["last"]
        self.last = last and TrainStepOutput(0.0, self.version, **last)
        return self._snapshots(checkpoint, dtype)

    def _check(self, checkpoint: Checkpoint) -> None:
        facts = checkpoint.facts
        if facts["base_hash"] != self.base_hash:
            raise CheckpointError(
                "the checkpoint was made with other base weights; resume with the model.path of "
                "its run"
            )
        stored_shapes = {
            name: [tuple(checkpoint.cartridge(name)[k].shape) for k in ("frozen", "trainable")]
            for name in facts["names"]
            if name in self.progress
        }
        bank = self.bank
        bank_shapes = {
            name: [tuple(part[name].shape) for part in (bank.frozen, bank.trainable)]
            for name in bank.names
        }
        if set(facts["names"]) != set(self.names) or stored_shapes != bank_shapes:
            raise CheckpointError(
                f"the checkpoint holds cartridges {facts['names']} of shapes (frozen, trainable) "
                f"{_shapes(stored_shapes)}, this run has {list(self.names)} of "
                f"{_shapes(bank_shapes)}; resume with the spec of its run"
            )
        holds = set.intersection(*(set(checkpoint.cartridge(name)) for name in stored_shapes))
        if (self.hinted is not None) != ("hinted" in holds):
            raise CheckpointError(
                "the checkpoint was made with another teacher of hints; resume with the "
                "objective of its run"
            )
        if self.reference is not None and "reference" not in holds:
            raise CheckpointError(
                "the checkpoint holds no reference for objective.grpo.kl; resume with the spec "
                "of its run"
            )

    def _snapshots(self, checkpoint: Checkpoint, dtype: torch.dtype) -> list[TrainerSnapshot]:
        """Return the published snapshots, which share equal copies. A copy that the checkpoint does
        not hold is of numbers that are still the trainer's."""
        copies: dict[tuple[int, int], Mapping[str, Tensor]] = {}

        def copy(i: int, name: str, since: int) -> Mapping[str, Tensor]:
            if (i, since) not in copies:
                stored = checkpoint.parts.get(part_name(PUBLISHED, i, since))
                copies[i, since] = self._copies(name, dtype) if stored is None else stored
            return copies[i, since]

        snapshots = []
        index = {name: i for i, name in enumerate(self.names)}
        for version, since in checkpoint.facts.get("published", {}).items():
            sinces = dict(zip(self.names, since, strict=True))
            tensors_of = {n: copy(index[n], n, sinces[n]) for n in self.bank.names}
            kv = {name: tensors["kv"] for name, tensors in tensors_of.items()}
            hinted = None
            if self.hinted is not None:
                hinted = {name: tensors["hinted"] for name, tensors in tensors_of.items()}
            since_of = {name: sinces[name] for name in self.bank.names}
            snapshots.append(TrainerSnapshot(int(version), since_of, kv, hinted))
        return snapshots

    def _copies(self, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
        parts = {"kv": self.progress[name].parameter.detach()}
        if self.hinted is not None:
            parts["hinted"] = self.hinted[name]
        return {key: self.bank.full(name, part).to(dtype) for key, part in parts.items()}


class Snapshots:
    """Hold a trainer's published `versions`, in `dtype`: the newest `keep` of them."""

    def __init__(self, dtype: torch.dtype, keep: int) -> None:
        self._dtype, self._keep = dtype, keep
        self.versions: dict[int, TrainerSnapshot] = {}  # oldest first

    @torch.no_grad()
    def add(
        self,
        version: int,
        since: Mapping[str, int],
        bank: CartridgeBank,
        hinted: Mapping[str, Tensor] | None,
    ) -> None:
        """Copy the bank at `version`, unless that is held. `hinted` are the trainable parts of the
        cartridges that read hints. Copies of cartridges unchanged after the version before are
        shared with it."""
        if version in self.versions:
            return
        previous = self.versions[max(self.versions)] if self.versions else None

        def copies(
            parts: Mapping[str, Tensor], previous_kv: Mapping[str, Tensor] | None
        ) -> dict[str, Tensor]:
            return {
                name: previous_kv[name]
                if previous_kv is not None
                and previous is not None
                and previous.since[name] == since[name]
                else bank.full(name, part.detach()).to(self._dtype)
                for name, part in parts.items()
            }

        self.versions[version] = TrainerSnapshot(
            version,
            dict(since),
            copies(bank.trainable, None if previous is None else previous.kv),
            None
            if hinted is None
            else copies(hinted, None if previous is None else previous.hinted),
        )
        for old in sorted(self.versions)[: -self._keep]:
            del self.versions[old]

    def restore(self, snapshots: Iterable[TrainerSnapshot]) -> None:
        """Hold these instead."""
        self.versions = {snapshot.version: snapshot for snapshot in snapshots}


def _shapes(shapes: Mapping[str, list[tuple[int, ...]]]) -> list[list[tuple[int, ...]]]:
    """Return the different shapes."""
    return [list(pair) for pair in dict.fromkeys(tuple(one) for one in shapes.values())]
